# SPDX-License-Identifier: Apache-2.0
"""Weight loaders that write straight into a layer's packed parameters, whatever form a weight arrives in.

Each tensor is loaded whole, before tensor parallelism cuts it, so every rank takes the global scale from the full
tensor. Loading in place is also refit: the parameters never change address.

What can be done for many matrices at once waits until the layer is complete, memory is short or somebody looks
(`PackedLoader.write_waiting`): float weights are quantized as stacks, scales are written and checked together.

vLLM's layerwise reload calls each loader twice: first with a meta parameter to count elements (answered by `_announce`,
without side effects), then with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vllm_quads.nvfp4 import BLOCK_SIZE, CheckpointError, PackedTensor, RefitError
from vllm_quads.plugin.parameters import ALIASES, CANONICAL, FIELD, FLOATS, PACKED_FIELDS, Matrix, Role
from vllm_quads.plugin.storage import PackedStorage
from vllm_quads.plugin.waiting import Waiting


@dataclass
class _Status:
    """What has arrived of one matrix."""

    fields: set[str] = field(default_factory=set)
    """Packed fields of an arrival that is not complete yet."""
    pending: Tensor | None = None
    """BF16 copy of the whole matrix that waits for those it shares its global scale with."""
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
        self._groups = {m.name: group for group in groups for m in group}
        self._status = {name: _Status() for name in self._groups}
        self._disk_name = disk_name
        self._frozen = frozen
        self._frozen_amax: dict[str, Tensor] = {}
        self._input_scales: dict[str, Tensor] = {}
        self._counting = False
        self._before: tuple[dict[str, Tensor], dict[str, str]] | None = None
        """Static activation scales, and what was damaged, before a reload that has not been finished."""
        self._names: dict[str, Role] = {FIELD[role]: role for role in CANONICAL}
        self.matrices = tuple(m for group in groups for m in group)
        """The matrices with a local shard, in order."""
        self._layer_bytes = sum(2 * m.n * m.k for m in self.matrices)
        self.storage = PackedStorage(layer, self.matrices)
        """Where their bytes are."""
        self.on_complete: Callable[[], None] | None = None
        """Called when every matrix has been loaded anew since the last call."""
        self.on_failed: Callable[[BaseException], None] | None = None
        """Called when a tensor could not be loaded, before the error is raised."""
        self._version = 0
        self._waiting = self._nothing()
        self._renewed: set[str] = set()
        """Matrices that have arrived whole since `on_complete` was called."""
        self._damaged: dict[str, str] = {}
        """Matrices that arrived and were refused when they were to be written, and why."""
        self._arriving = False
        """False if no matrix has arrived only in part; True if one might have."""
        self._whole = False
        """True if every matrix is complete; False if one might not be."""
        self.awaits_placeholders = False
        """True if vLLM's layerwise reload waits for every element, also of parameters that no checkpoint has."""

    @property
    def version(self) -> int:
        """Grows with every change of the parameters. Asking for it writes what waits (`write_waiting`)."""
        self.write_waiting()
        return self._version

    @property
    def is_open(self) -> bool:
        """True if the parameters hold the packed weights; False if they are empty and the backend does."""
        return self.storage.is_open

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, matrix: Matrix, role: Role, tensor: Tensor, param: Tensor) -> None:
        """Load one whole tensor of one matrix. Raises CheckpointError for a wrong dtype or shape.

        A wrong value is found here or in `write_waiting`, and stays an error until the matrix is loaded anew.
        """
        try:
            self._load(matrix, role, tensor, param)
        except BaseException as e:
            if self.on_failed is not None:
                self.on_failed(e)
            raise

    def _load(self, matrix: Matrix, role: Role, tensor: Tensor, param: Tensor) -> None:
        quantize = role is Role.WEIGHT and tensor.is_floating_point() and tensor.element_size() > 1
        self._check(matrix, role, tensor, quantize)
        if param.is_meta:
            self._announce(matrix, role, quantize)
            return
        self._counting = False
        self._arriving = True
        self._version += 1
        self._names[FIELD[role]] = role
        if quantize:
            self._load_float(matrix, tensor)
        else:
            self._load_packed(matrix, role, tensor)

    def _load_float(self, matrix: Matrix, tensor: Tensor) -> None:
        status, group = self._status[matrix.name], self._groups[matrix.name]
        self._refuse_unknown_scale(group)
        if group[0].name in self._waiting.floats:
            self.write_waiting()
        status.fields.clear()
        status.pending = tensor.detach().to(self.storage.device, torch.bfloat16, copy=True)
        arrived = [(m, pending) for m in group if (pending := self._status[m.name].pending) is not None]
        if len(arrived) < len(group):
            return
        for m in group:
            self._status[m.name].pending = None
        self._waiting.floats.add(arrived)
        self._arrived(group)

    def _load_packed(self, matrix: Matrix, role: Role, tensor: Tensor) -> None:
        status, what = self._status[matrix.name], FIELD[role]
        if self._groups[matrix.name][0].name in self._waiting.floats:
            self.write_waiting()
        status.pending = None
        if what in ("global", "input"):
            self._waiting.scalars[matrix.name, what] = (matrix, role, tensor.reshape(()).to(torch.float32, copy=True))
        else:
            unit = 2 if what == "codes" else BLOCK_SIZE
            target = Role.WEIGHT if what == "codes" else Role.BLOCK_SCALE
            if not matrix.is_whole:
                start, length = matrix.local_k
                tensor = tensor.narrow(0, *matrix.local_n).narrow(1, start // unit, length // unit)
            self.storage.write(matrix, target, tensor)
        if what == "input":
            return
        status.fields.add(what)
        if status.fields == PACKED_FIELDS:
            status.fields.clear()
            self._waiting.packed[matrix.name] = matrix
            self._arrived([matrix])

    def _arrived(self, matrices: Iterable[Matrix]) -> None:
        """These matrices have arrived whole and wait."""
        self._renewed.update(m.name for m in matrices)
        if self._waiting.floats.is_full or len(self._renewed) == len(self.matrices):
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write, and check, what has arrived and waits for more of its kind.

        Raises CheckpointError naming a weight that holds NaN or Inf or a scale that is damaged; then the matrices that
        waited count as damaged until they are loaded anew.
        """
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = self._nothing()
        self._version += 1
        matrices, whole = waiting.matrices(), waiting.whole()
        try:
            waiting.write(self.storage, self._shared_amax, self._where, self._input_scales)
        except BaseException as e:  # also out of memory, or an interrupt: what waited is lost
            self._whole = False
            lost = "was not written when it arrived"
            for m in matrices:
                known = isinstance(e, CheckpointError)
                self._damaged[m.name] = (
                    str(e) if known else f"{self._where(m, Role.WEIGHT)}: {lost} ({type(e).__name__})"
                )
                self._renewed.discard(m.name)
                status = self._status[m.name]
                status.fields.clear()
                status.complete = False
            raise
        for m in whole:
            self._damaged.pop(m.name, None)
            status = self._status[m.name]
            status.complete = status.ever_loaded = True
        if len(self._renewed) == len(self.matrices):
            self._renewed.clear()
            if self.on_complete is not None:
                self.on_complete()

    def _check(self, matrix: Matrix, role: Role, tensor: Tensor, quantize: bool) -> None:
        scalar = FIELD[role] in ("global", "input")
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
            also = " or a BF16/FP16/FP32 weight" if role is Role.WEIGHT and not quantize else ""
            raise CheckpointError(f"{self._where(matrix, role)}: is {tensor.dtype}, expected {dtypes[0]}{also}")
        if tensor.numel() != 1 if scalar else tensor.shape != shape:
            raise CheckpointError(f"{self._where(matrix, role)}: has shape {tuple(tensor.shape)}, expected {shape}")

    def _announce(self, matrix: Matrix, role: Role, quantize: bool) -> None:
        """Let vLLM's element counter see a copy of as many elements as this tensor will fill."""
        if not self._counting:  # a new reload begins: what was complete before does not count for it
            self._counting = True
            for m in self._waiting.matrices():
                self._damaged[m.name] = f"{self._where(m, Role.WEIGHT)}: a reload began before it was written"
            self._before = dict(self._input_scales), dict(self._damaged)
            self._waiting = self._nothing()
            self._whole = False
            self._renewed.clear()
            for status in self._status.values():  # what an interrupted load has left must not stand in for anything
                status.complete = False
                status.fields.clear()
                status.pending = None
        rows, channels = matrix.local_n[1], matrix.local_k[1]
        codes, scales = rows * channels // 2, rows * channels // BLOCK_SIZE
        fields = {"codes": codes, "scales": scales, "global": 1, "input": 0}
        count = codes + scales + 1 if quantize else fields[FIELD[role]]
        if self.awaits_placeholders and FIELD[role] == "codes":
            # This matrix's share of the placeholders, one per expert or part, and its input scale. Counted with the
            # largest parameter, for vLLM counts no more elements than a parameter has.
            count += 1 + (len(ALIASES) if len(matrix.scalar) == 1 or matrix.scalar[1] == 0 else 0)
        torch.empty(count, device="meta").copy_(torch.empty(count, device="meta"))

    def _shared_amax(self, keys: list[str], amax: Tensor) -> Tensor:
        """What groups, named by their first matrices, are quantized with if amax float32 [groups] is their own."""
        if not self._frozen:
            return amax
        kept = [self._frozen_amax.setdefault(key, own) for key, own in zip(keys, amax.unbind(), strict=True)]
        return torch.stack(kept)

    def _refuse_unknown_scale(self, group: list[Matrix]) -> None:
        """Raise RefitError where only a packed checkpoint knows the frozen scale of a group."""
        unknown = self._frozen and group[0].name not in self._frozen_amax
        if unknown and any(self._status[m.name].ever_loaded for m in group):
            raise self._packed_only(group[0])

    def _packed_only(self, matrix: Matrix) -> RefitError:
        return RefitError(
            f"{self._where(matrix, Role.WEIGHT)}: a weight_global_scale other than 'live' is that of the packed "
            f"checkpoint, so this engine takes packed weights only; push with packed=True"
        )

    # -- after loading -------------------------------------------------------------------------------------------

    def finish(self, *, need_input_scale: bool = False) -> None:
        """Check that every matrix is complete, and start over. Raises CheckpointError naming the first missing tensor.

        Called once after the first load and after every layerwise reload, on freshly made parameters.
        """
        self.write_waiting()
        self._counting = False
        self._renewed.clear()
        partial = self._partial()
        for matrix in self.matrices:
            status = self._status[matrix.name]
            if not status.complete or matrix is partial:
                raise CheckpointError(f"{self._first_missing(matrix)}: is missing; the checkpoint is incomplete")
            if need_input_scale and matrix.name not in self._input_scales:
                raise CheckpointError(
                    f"{self._where(matrix, Role.INPUT_SCALE)}: is missing, but activation.global_scale='static' needs "
                    f"it; use activation.global_scale='token' or a checkpoint that was calibrated"
                )
        for prefix in dict.fromkeys(m.prefix for m in self.matrices):
            self.storage.tensor(prefix, Role.INPUT_SCALE).zero_()
        self.restore_input_scales()
        self._before = None
        self._version += 1

    def fill_dummy(self) -> None:
        """Small random weights, for engines that start without weights (load_format='dummy')."""
        for prefix in dict.fromkeys(m.prefix for m in self.matrices):
            codes = self.storage.tensor(prefix, Role.WEIGHT)
            codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=codes.device))
            self.storage.tensor(prefix, Role.BLOCK_SCALE).view(torch.uint8).fill_(0x38)  # 1.0
            self.storage.tensor(prefix, Role.DECODE_SCALE).fill_(1e-3)
            self.storage.tensor(prefix, Role.INPUT_SCALE).zero_()
        self._version += 1

    def check_settled(self) -> None:
        """Raise RefitError if a matrix has arrived only in part or damaged, naming the tensor."""
        self.write_waiting()
        if self._damaged:
            raise RefitError(
                f"{next(iter(self._damaged.values()))}. The layer may hold a mixture of old and new weights: load them "
                f"again, or push with trainer_qat.RolloutSync"
            )
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
            self._waiting.forget_partial()
        self._renewed.clear()  # or the next load would count as complete too early
        self._version += 1

    def reload_abandoned(self) -> None:
        """Forget what has arrived of a reload that was not finished: the parameters are those of the time before it."""
        self._counting = False
        if self._before is not None:
            self._input_scales, self._damaged = self._before
            self._before, self._waiting = None, self._nothing()
        self.forget_partial()

    @property
    def ever_loaded(self) -> bool:
        """True once anything has been loaded."""
        return bool(self._waiting) or any(s.ever_loaded for s in self._status.values())

    def has_input_scales(self) -> bool:
        """True if every matrix has a static activation scale."""
        self.write_waiting()
        return all(name in self._input_scales for name in self._status)

    # -- refit -------------------------------------------------------------------------------------------------------

    def set_input_scale(self, matrix: Matrix, value: Tensor) -> None:
        """Take over a static activation scale (decode direction)."""
        self._input_scale(matrix).copy_(value)
        self._input_scales[matrix.name] = value.clone()

    def restore_input_scales(self) -> None:
        """Write the static activation scales anew, from the copies that do not belong to the layer."""
        for prefix in dict.fromkeys(m.prefix for m in self.matrices):
            some = [m for m in self.matrices if m.prefix == prefix and m.name in self._input_scales]
            if some:
                values = torch.stack([self._input_scales[m.name] for m in some])
                self.storage.write_scalars(some, Role.INPUT_SCALE, values)

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
        """What `recall` needs beside the parameters to go back to this moment. Writes what waits."""
        self.write_waiting()
        return dict(self._input_scales)

    def recall(self, kept: dict[str, Tensor]) -> None:
        """Go back: codes and other scales are the caller's to restore, what has arrived in part is dropped."""
        for matrix in self.matrices:
            before = kept.get(matrix.name)
            if self._input_scales.get(matrix.name) is not before:
                scale = self._input_scale(matrix)
                scale.fill_(0) if before is None else scale.copy_(before)
        self._input_scales = dict(kept)
        self.forget_partial()

    def replaced(self) -> None:
        """Every matrix has been written from outside of the loader."""
        self._waiting = self._nothing()
        self._damaged.clear()
        if not self._whole:
            for status in self._status.values():
                status.complete = status.ever_loaded = True
            self._whole = True
        self.forget_partial()

    def is_partial(self) -> bool:
        """True if a matrix has arrived only in part or damaged, so that the layer cannot serve. Writes what waits."""
        try:
            self.write_waiting()
        except CheckpointError:
            return True
        return bool(self._damaged) or self._partial() is not None

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
        self.write_waiting()
        return PackedTensor(*self.storage.shard(matrix), self._where(matrix, Role.WEIGHT))

    def _first_missing(self, matrix: Matrix) -> str:
        status = self._status[matrix.name]
        if status.pending is not None:
            waiting = next((m for m in self._groups[matrix.name] if self._status[m.name].pending is None), matrix)
            return self._where(waiting, Role.WEIGHT)
        if not status.fields:
            return self._where(matrix, Role.WEIGHT)
        lacking = next(f for f in ("codes", "scales", "global") if f not in status.fields)
        return self._where(matrix, self._names[lacking])

    def _input_scale(self, matrix: Matrix) -> Tensor:
        return self.storage.tensor(matrix.prefix, Role.INPUT_SCALE)[matrix.scalar]

    def _nothing(self) -> Waiting:
        return Waiting(self.matrices, self._layer_bytes)

    def _where(self, matrix: Matrix, role: Role) -> str:
        return self._disk_name(f"{matrix.name}.{role.value}")
