# SPDX-License-Identifier: Apache-2.0
"""Weight loaders that write straight into a layer's packed parameters, whatever form a weight arrives in.

One set of canonical parameters serves every source: BF16 (quantized on arrival), ModelOpt names (decode scales) and
compressed-tensors names (encode scales). Each tensor is loaded whole, before tensor parallelism cuts it, so every rank
takes the global scale from the full tensor. Loading in place is also refit: the parameters never change address.

vLLM's layerwise reload calls each loader twice: first with a meta parameter to count elements (answered by `_announce`,
without side effects), then with the real one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from vllm_quads.nvfp4 import BLOCK_SIZE, CheckpointError, FormatError, PackedTensor, RefitError, weight_amax

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Role(str, Enum):
    """Which tensor of a packed weight a parameter stands for; the value is the name in checkpoints."""

    WEIGHT = "weight"
    """A float weight to quantize, or ModelOpt's packed codes."""
    WEIGHT_PACKED = "weight_packed"
    """compressed-tensors' packed codes."""
    BLOCK_SCALE = "weight_scale"
    DECODE_SCALE = "weight_scale_2"
    ENCODE_SCALE = "weight_global_scale"
    INPUT_SCALE = "input_scale"
    INPUT_ENCODE_SCALE = "input_global_scale"


CANONICAL = (Role.WEIGHT, Role.BLOCK_SCALE, Role.DECODE_SCALE, Role.INPUT_SCALE)
ALIASES = (Role.WEIGHT_PACKED, Role.ENCODE_SCALE, Role.INPUT_ENCODE_SCALE)
"""Names that other checkpoint formats use; their parameters are placeholders whose loaders write canonical ones."""

_FIELD = {
    Role.WEIGHT: "codes",
    Role.WEIGHT_PACKED: "codes",
    Role.BLOCK_SCALE: "scales",
    Role.DECODE_SCALE: "global",
    Role.ENCODE_SCALE: "global",
    Role.INPUT_SCALE: "input",
    Role.INPUT_ENCODE_SCALE: "input",
}
_PACKED_FIELDS = frozenset(("codes", "scales", "global"))


@dataclass(frozen=True)
class Matrix:
    """One quantized [N, K] matrix of the model and where its local shard lives in a layer's packed parameters."""

    name: str
    """Canonical name."""
    n: int
    k: int
    """Shape of the whole matrix."""
    local_n: tuple[int, int]
    """(first row, rows) of the local shard."""
    local_k: tuple[int, int]
    """(first channel, channels) of the local shard."""
    prefix: str
    """Parameter name prefix: `w13_`, `w2_`, or empty."""
    rows: tuple[int | slice, ...]
    """Index of the shard's rows in the codes and block scales."""
    scalar: tuple[int, ...]
    """Index of the matrix in the global and input scales."""
    counted: bool = True
    """False if another rank has the same shard, and counts it where digests are added up over ranks."""


@dataclass
class _Status:
    """What has arrived of one matrix."""

    fields: set[str] = field(default_factory=set)
    """Packed fields of an arrival that is not complete yet."""
    pending: Tensor | None = None
    """BF16 copy that waits for the matrices it shares its global scale with."""
    complete: bool = False
    """Loaded since the last `finish`."""
    ever_loaded: bool = False


class PackedLoader:
    """Fills the packed parameters of one layer and knows what is still missing.

    Groups are the matrices that share one global scale when they are quantized here.
    """

    def __init__(
        self, layer: nn.Module, groups: list[list[Matrix]], disk_name: Callable[[str], str], *, frozen: bool = False
    ) -> None:
        # Parameters hold their loader, and vLLM's reload metadata holds parameters: a strong reference would keep the
        # layer alive for ever.
        self._layer = weakref.ref(layer)
        self._groups = {m.name: group for group in groups for m in group}
        self._status = {name: _Status() for name in self._groups}
        self._disk_name = disk_name
        self._frozen = frozen
        self._frozen_amax: dict[str, Tensor] = {}
        self._input_scales: dict[str, Tensor] = {}
        self._counting = False
        self._names: dict[str, Role] = {_FIELD[role]: role for role in CANONICAL}
        self.matrices = tuple(m for group in groups for m in group)
        """The matrices with a local shard, in order."""
        self.version = 0
        """Grows with every change of the parameters."""
        self.on_complete: Callable[[], None] | None = None
        """Called when every matrix has been loaded anew since the last call."""
        self._renewed: set[str] = set()
        self._arriving = False
        """False if no matrix has arrived only in part; True if one might have."""
        self._whole = False
        """True if every matrix is complete; False if one might not be."""
        self.awaits_placeholders = False
        """True if vLLM's layerwise reload waits for every element, also of parameters that no checkpoint has."""
        self.kept_elsewhere: Callable[[str], tuple[Tensor, Tensor]] | None = None
        """Gives codes and block scales of a parameter prefix if they are kept outside of the parameters (`close`)."""

    # -- where the bytes are --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if the parameters hold the packed weights; False if they are empty and the backend does."""
        return self._param(self.matrices[0], Role.WEIGHT, fill=False).numel() > 0

    def close(self) -> None:
        """Empty the packed parameters: the backend has taken them over. They are filled again when something asks."""
        with torch.inference_mode(False):  # or nothing could be loaded into them outside of it
            for prefix in dict.fromkeys(m.prefix for m in self.matrices):
                for role in (Role.WEIGHT, Role.BLOCK_SCALE):
                    param = self._parameter(prefix, role)
                    param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    def _open(self) -> None:
        assert self.kept_elsewhere is not None
        with torch.inference_mode(False), torch.no_grad():
            for prefix in dict.fromkeys(m.prefix for m in self.matrices):
                codes, scales = self.kept_elsewhere(prefix)
                self._parameter(prefix, Role.WEIGHT).data = codes
                self._parameter(prefix, Role.BLOCK_SCALE).data = scales

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, matrix: Matrix, role: Role, tensor: Tensor, param: Tensor) -> None:
        """Load one whole tensor of one matrix. Raises CheckpointError for a wrong dtype, shape or value."""
        quantize = role is Role.WEIGHT and tensor.is_floating_point() and tensor.element_size() > 1
        self._check(matrix, role, tensor, quantize)
        if param.is_meta:
            self._announce(matrix, role, quantize)
            return
        self._counting = False
        self._arriving = True
        status = self._status[matrix.name]
        self.version += 1
        self._names[_FIELD[role]] = role
        if quantize:
            status.pending = tensor.detach().to(torch.bfloat16, copy=True)
            status.fields.clear()
            group = self._groups[matrix.name]
            if all(self._status[m.name].pending is not None for m in group):
                self._quantize(group)
            return
        status.pending = None
        self._write(matrix, role, tensor)
        if _FIELD[role] == "input":
            return
        status.fields.add(_FIELD[role])
        if status.fields == _PACKED_FIELDS:
            self._check_packed(matrix)
            self._settle(matrix)

    def _settle(self, matrix: Matrix) -> None:
        status = self._status[matrix.name]
        status.fields.clear()
        status.pending = None
        status.complete = status.ever_loaded = True
        self._renewed.add(matrix.name)
        if len(self._renewed) == len(self.matrices):
            self._renewed.clear()
            if self.on_complete is not None:
                self.on_complete()

    def _check(self, matrix: Matrix, role: Role, tensor: Tensor, quantize: bool) -> None:
        where = self._where(matrix, role)
        scalar = _FIELD[role] in ("global", "input")
        if quantize:
            dtypes: tuple[torch.dtype, ...] = FLOATS
            shape: tuple[int, ...] = (matrix.n, matrix.k)
        elif role in (Role.WEIGHT, Role.WEIGHT_PACKED):
            dtypes, shape = (torch.uint8,), (matrix.n, matrix.k // 2)
        elif role is Role.BLOCK_SCALE:
            dtypes, shape = (torch.float8_e4m3fn,), (matrix.n, matrix.k // BLOCK_SIZE)
        else:
            dtypes, shape = (torch.float32,), ()
        if tensor.dtype not in dtypes:
            also = " or a BF16/FP16/FP32 weight" if role is Role.WEIGHT else ""
            raise CheckpointError(f"{where}: is {tensor.dtype}, expected {dtypes[0]}{'' if quantize else also}")
        if (scalar and tensor.numel() != 1) or (not scalar and tuple(tensor.shape) != shape):
            raise CheckpointError(f"{where}: has shape {tuple(tensor.shape)}, expected {shape}")
        if scalar and not tensor.is_meta:
            value = float(tensor.reshape(()))
            if not (0.0 < value < float("inf")):
                raise CheckpointError(
                    f"{where}: is {value}, expected a finite, positive scale; the checkpoint is damaged"
                )

    def _announce(self, matrix: Matrix, role: Role, quantize: bool) -> None:
        """Let vLLM's element counter see a copy of as many elements as this tensor will fill."""
        if not self._counting:  # a new reload begins: what was complete before does not count for it
            self._counting = True
            self._whole = False
            for status in self._status.values():
                status.complete = False
        rows, channels = matrix.local_n[1], matrix.local_k[1]
        codes, scales = rows * channels // 2, rows * channels // BLOCK_SIZE
        fields = {"codes": codes, "scales": scales, "global": 1, "input": 0}
        count = codes + scales + 1 if quantize else fields[_FIELD[role]]
        if self.awaits_placeholders and _FIELD[role] == "codes":
            # This matrix's share of the placeholders, one per expert or part, and its input scale. Counted with the
            # largest parameter, for vLLM counts no more elements than a parameter has.
            count += 1 + (len(ALIASES) if len(matrix.scalar) == 1 or matrix.scalar[1] == 0 else 0)
        torch.empty(count, device="meta").copy_(torch.empty(count, device="meta"))

    def _write(self, matrix: Matrix, role: Role, tensor: Tensor) -> None:
        what = _FIELD[role]
        if what in ("global", "input"):
            value = tensor.reshape(()).to(torch.float32)
            if role in (Role.ENCODE_SCALE, Role.INPUT_ENCODE_SCALE):
                value = 1.0 / value
            if what == "input":
                self.set_input_scale(matrix, value)
            else:
                self._param(matrix, Role.DECODE_SCALE)[matrix.scalar].copy_(value)
            return
        unit = 2 if what == "codes" else BLOCK_SIZE
        target = Role.WEIGHT if what == "codes" else Role.BLOCK_SCALE
        shard = tensor.narrow(0, *matrix.local_n).narrow(1, matrix.local_k[0] // unit, matrix.local_k[1] // unit)
        # Bytes are copied as bytes: float8 has few kernels, and NaN codes must arrive as they are to be refused.
        self._param(matrix, target)[matrix.rows].view(torch.uint8).copy_(shard.view(torch.uint8))

    def _quantize(self, group: list[Matrix]) -> None:
        weights = []
        for m in group:
            pending = self._status[m.name].pending
            assert pending is not None
            weights.append(pending)
        try:
            amax = self._amax(group, weights)
            for m, weight in zip(group, weights, strict=True):
                target = self._param(m, Role.WEIGHT)
                shard = weight.narrow(0, *m.local_n).narrow(1, *m.local_k).to(target.device)
                packed = PackedTensor.quantize(shard, amax=amax.to(target.device), name=self._where(m, Role.WEIGHT))
                target[m.rows].copy_(packed.codes)
                self._param(m, Role.BLOCK_SCALE)[m.rows].view(torch.uint8).copy_(packed.block_scales.view(torch.uint8))
                self._param(m, Role.DECODE_SCALE)[m.scalar].copy_(packed.decode_scale)
        except FormatError as e:
            for m in group:
                self._status[m.name].pending = None
            raise CheckpointError(str(e)) from e
        for m in group:
            self._settle(m)

    def _amax(self, group: list[Matrix], weights: list[Tensor]) -> Tensor:
        amaxes = [weight_amax(w, self._where(m, Role.WEIGHT)) for m, w in zip(group, weights, strict=True)]
        amax = torch.stack(amaxes).amax()
        if not self._frozen:
            return amax
        key = group[0].name
        if key not in self._frozen_amax and any(self._status[m.name].ever_loaded for m in group):
            raise self._packed_only(group[0])
        return self._frozen_amax.setdefault(key, amax)

    def _packed_only(self, matrix: Matrix) -> RefitError:
        return RefitError(
            f"{self._where(matrix, Role.WEIGHT)}: a weight_global_scale other than 'live' is that of the packed "
            f"checkpoint, so this engine takes packed weights only; push with packed=True"
        )

    def _check_packed(self, matrix: Matrix) -> None:
        try:
            self.packed(matrix).check_values()
        except FormatError as e:
            raise CheckpointError(str(e)) from e

    # -- after loading -------------------------------------------------------------------------------------------

    def finish(self, *, need_input_scale: bool = False) -> None:
        """Check that every matrix is complete, and start over. Raises CheckpointError naming the first missing tensor.

        Called once after the first load and after every layerwise reload, on freshly made parameters.
        """
        self._counting = False
        self._renewed.clear()
        for matrix in self.matrices:
            status = self._status[matrix.name]
            if not status.complete:
                raise CheckpointError(f"{self._first_missing(matrix)}: is missing; the checkpoint is incomplete")
            if need_input_scale and matrix.name not in self._input_scales:
                raise CheckpointError(
                    f"{self._where(matrix, Role.INPUT_SCALE)}: is missing, but activation.global_scale='static' needs "
                    f"it; use activation.global_scale='token' or a checkpoint that was calibrated"
                )
            kept = self._input_scales.get(matrix.name)
            scale = self._param(matrix, Role.INPUT_SCALE)[matrix.scalar]
            scale.fill_(0) if kept is None else scale.copy_(kept)
        self.version += 1

    def fill_dummy(self) -> None:
        """Small random weights, for engines that start without weights (load_format='dummy')."""
        for matrix in {m.prefix: m for m in self.matrices}.values():
            codes = self._param(matrix, Role.WEIGHT)
            codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=codes.device))
            self._param(matrix, Role.BLOCK_SCALE).view(torch.uint8).fill_(0x38)  # 1.0
            self._param(matrix, Role.DECODE_SCALE).fill_(1e-3)
            self._param(matrix, Role.INPUT_SCALE).fill_(0.0)
        self.version += 1

    def check_settled(self) -> None:
        """Raise RefitError if a matrix has arrived only in part, naming the tensor that is missing."""
        matrix = self._partial()
        if matrix is not None:
            raise RefitError(
                f"{self._first_missing(matrix)}: was not sent, but the rest of its weight was; the layer holds a "
                f"mixture of old and new weights. Send the missing tensor, or push with trainer_qat.RolloutSync"
            )

    def forget_partial(self) -> None:
        """Drop what has arrived in part (after a rollback)."""
        if self._arriving:
            for status in self._status.values():
                status.fields.clear()
                status.pending = None
            self._arriving = False
        self._renewed.clear()  # or the next load would count as complete too early
        self.version += 1

    @property
    def ever_loaded(self) -> bool:
        """True once anything has been loaded."""
        return any(s.ever_loaded for s in self._status.values())

    def has_input_scales(self) -> bool:
        """True if every matrix has a static activation scale."""
        return all(name in self._input_scales for name in self._status)

    # -- refit -------------------------------------------------------------------------------------------------------

    def set_input_scale(self, matrix: Matrix, value: Tensor) -> None:
        """Take over a static activation scale (decode direction)."""
        self._param(matrix, Role.INPUT_SCALE)[matrix.scalar].copy_(value)
        self._input_scales[matrix.name] = value.clone()

    def restore_input_scales(self) -> None:
        """Write the static activation scales anew, from the copies that do not belong to the layer."""
        for matrix in self.matrices:
            kept = self._input_scales.get(matrix.name)
            if kept is not None:
                self._param(matrix, Role.INPUT_SCALE)[matrix.scalar].copy_(kept)

    def frozen_amax(self, matrices: Iterable[Matrix]) -> Tensor | None:
        """The amax float32 [n] that float weights of these matrices are quantized with, or None if it is their own.

        Raises RefitError if only a packed checkpoint knows it.
        """
        if not self._frozen:
            return None
        keys = [self._groups[m.name][0] for m in matrices]
        lacking = next((m for m in keys if m.name not in self._frozen_amax), None)
        if lacking is not None:
            raise self._packed_only(lacking)
        return torch.stack([self._frozen_amax[m.name] for m in keys])

    def remember(self) -> dict[str, Tensor]:
        """What `recall` needs beside the parameters to go back to this moment."""
        return dict(self._input_scales)

    def recall(self, kept: dict[str, Tensor]) -> None:
        """Go back: codes and other scales are the caller's to restore, what has arrived in part is dropped."""
        for matrix in self.matrices:
            before = kept.get(matrix.name)
            if self._input_scales.get(matrix.name) is not before:
                scale = self._param(matrix, Role.INPUT_SCALE)[matrix.scalar]
                scale.fill_(0) if before is None else scale.copy_(before)
        self._input_scales = dict(kept)
        self.forget_partial()

    def replaced(self) -> None:
        """Every matrix has been written from outside of the loader."""
        if not self._whole:
            for status in self._status.values():
                status.complete = status.ever_loaded = True
            self._whole = True
        self.forget_partial()

    def is_partial(self) -> bool:
        """True if a matrix has arrived only in part, so that the layer cannot serve."""
        return self._partial() is not None

    def _partial(self) -> Matrix | None:
        """The first matrix that has arrived only in part."""
        if self._arriving:
            for matrix in self.matrices:
                status = self._status[matrix.name]
                if status.fields or status.pending is not None:
                    return matrix
            self._arriving = False
        return None

    def packed(self, matrix: Matrix) -> PackedTensor:
        """The local shard of a matrix as it is in the parameters (views)."""
        return PackedTensor(
            self._param(matrix, Role.WEIGHT)[matrix.rows],
            self._param(matrix, Role.BLOCK_SCALE)[matrix.rows],
            self._param(matrix, Role.DECODE_SCALE)[matrix.scalar],
            self._where(matrix, Role.WEIGHT),
        )

    def _first_missing(self, matrix: Matrix) -> str:
        status = self._status[matrix.name]
        if status.pending is not None:
            waiting = next((m for m in self._groups[matrix.name] if self._status[m.name].pending is None), matrix)
            return self._where(waiting, Role.WEIGHT)
        if not status.fields:
            return self._where(matrix, Role.WEIGHT)
        lacking = next(f for f in ("codes", "scales", "global") if f not in status.fields)
        return self._where(matrix, self._names[lacking])

    def _param(self, matrix: Matrix, role: Role, *, fill: bool = True) -> Tensor:
        param = self._parameter(matrix.prefix, role)
        if fill and param.numel() == 0:
            self._open()
        return param.data

    def _parameter(self, prefix: str, role: Role) -> nn.Parameter:
        layer = self._layer()
        assert layer is not None
        param: nn.Parameter = getattr(layer, prefix + role.value)
        return param

    def _where(self, matrix: Matrix, role: Role) -> str:
        return self._disk_name(f"{matrix.name}.{role.value}")


def add_parameters(
    layer: nn.Module,
    prefix: str,
    rows: tuple[int, ...],
    k: int,
    scalars: tuple[int, ...],
    loader: Callable[..., object],
) -> None:
    """Register the packed parameters of matrices [*rows, K] and the placeholders of other checkpoint formats.

    scalars: shape of the global scales. All are created at once, on the default device, in their final form.
    """
    shapes: dict[Role, tuple[tuple[int, ...], torch.dtype]] = {
        Role.WEIGHT: ((*rows, k // 2), torch.uint8),
        Role.BLOCK_SCALE: ((*rows, k // BLOCK_SIZE), torch.float8_e4m3fn),
        Role.DECODE_SCALE: (scalars, torch.float32),
        Role.INPUT_SCALE: (scalars, torch.float32),
    }
    # Placeholders lead with the expert dimension, as everything that expert parallelism looks at must.
    shapes |= dict.fromkeys(ALIASES, ((scalars[0], 1), torch.float32))
    for role, (shape, dtype) in shapes.items():
        raw = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
        param = nn.Parameter(raw.view(dtype), requires_grad=False)
        param.quads_role = role  # type: ignore[attr-defined]
        param.weight_loader = loader  # type: ignore[attr-defined]
        if role in (*ALIASES, Role.INPUT_SCALE):
            param.weight_loader_numel = 0  # type: ignore[attr-defined]  # not awaited by vLLM's layerwise reload
        layer.register_parameter(prefix + role.value, param)
