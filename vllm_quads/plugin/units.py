# SPDX-License-Identifier: Apache-2.0
"""Units: the tensors that a refit installs at once, and how one of them gets from what was sent into its parameters.

A unit is all experts' gate and up of a layer, all experts' down, or the parts of one dense linear: the matrices that
share parameters and, if they are quantized here, global scales. Its matrices lie in one section [E, P] (experts, parts)
or, where parts differ in rows, in one section [1, 1] each. Every rank gets whole tensors and cuts its own shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_quads.kernels.install import ShardPlace, stack_amax
from vllm_quads.kernels.weights import QuantizedStack, digest_stack, quantize_stack, weight_amax
from vllm_quads.nvfp4 import BLOCK_SIZE, unit_of
from vllm_quads.plugin.backends import Receipt, WeightHolder
from vllm_quads.plugin.flags import Flags
from vllm_quads.plugin.parameters import Matrix, Role
from vllm_quads.plugin.runtime import ExpertsRuntime, LayerRuntime

FIELD_DTYPES = {
    "float": torch.bfloat16,
    "codes": torch.uint8,
    "scales": torch.float8_e4m3fn,
    "global": torch.float32,
    "input": torch.float32,
}
_UNITS_PER_K = {"float": 1, "codes": 2, "scales": BLOCK_SIZE}
PACKED_FIELDS = ("codes", "scales", "global")


@dataclass(frozen=True)
class Section:
    """Matrices of one shape in storage order [E, P]."""

    matrices: tuple[Matrix, ...]
    lead: tuple[int, int]
    rows: slice | None
    """Rows of the parameter that belong to the section; None: the parameter is the section."""

    @property
    def first(self) -> Matrix:
        """Any matrix: all have this one's shape and place of the shard."""
        return self.matrices[0]

    @cached_property
    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field before tensor parallelism cuts it."""
        n, k = self.first.n, self.first.k
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(FIELD_DTYPES, self.lead)
        return shapes | {field: (*self.lead, n, k // units) for field, units in _UNITS_PER_K.items()}

    @cached_property
    def is_whole(self) -> bool:
        """True if this rank's shards are the whole matrices."""
        m = self.first
        return (m.local_n, m.local_k) == ((0, m.n), (0, m.k))

    @cached_property
    def place(self) -> ShardPlace:
        """Where this rank's shards lie."""
        rows, channels = self.first.local_n[0], self.first.local_k[0]
        return ShardPlace(rows, channels, rows == 0 and channels == 0)

    def digest(self, shard: QuantizedStack, out: Tensor) -> None:
        """Digests of the matrices into out, int64 [matrices]; zero if another rank counts these shards."""
        if self.first.counted:
            digest_stack(shard, **self.place._asdict(), out=out.view(self.lead))

    def shard(self, field: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole field."""
        if self.is_whole or field not in _UNITS_PER_K:
            return tensor
        start, length = (x // _UNITS_PER_K[field] for x in self.first.local_k)
        return tensor.narrow(-2, *self.first.local_n).narrow(-1, start, length)

    def packed(self, fields: Mapping[str, Tensor]) -> QuantizedStack:
        """This rank's part [E, P, ...] of whole packed fields."""
        shapes = self.full_shapes
        return QuantizedStack(*(self.shard(field, fields[field].reshape(shapes[field])) for field in PACKED_FIELDS))


class Unit:
    """One unit of a quantized layer on this rank."""

    def __init__(self, key: str, runtime: LayerRuntime, prefix: str, sections: Sequence[Section]) -> None:
        self.key = key
        """Name of the layer's runtime."""
        self.runtime = runtime
        self.prefix = prefix
        self.sections = tuple(sections)
        self.matrices = tuple(m for s in sections for m in s.matrices)
        self.name = unit_of(self.matrices[0].name)
        self.experts = runtime.w2.group_index if isinstance(runtime, ExpertsRuntime) else None
        """Global ids of the local experts, in storage order; None for a dense linear."""
        backend = runtime.backend if isinstance(runtime, ExpertsRuntime) else None
        self._holder = backend if isinstance(backend, WeightHolder) else None

    @property
    def holder(self) -> WeightHolder | None:
        """The backend, if it keeps the weights now and the parameters are empty."""
        return None if self._holder is None or self.runtime.loader.is_open else self._holder

    def storages(self) -> list[Tensor]:
        """The tensors that hold the unit; their addresses do not change."""
        scales = [self._param(Role.DECODE_SCALE), self._param(Role.INPUT_SCALE)]
        holder = self.holder
        if holder is not None:
            return [holder.stored(self.prefix), *scales]
        return [self._param(Role.WEIGHT), self._param(Role.BLOCK_SCALE), *scales]

    def stored(self) -> list[QuantizedStack]:
        """Each section's shard [E, P, ...] as it serves: views of parameters, or copies if a backend holds them."""
        decode = self._param(Role.DECODE_SCALE)
        holder = self.holder
        if holder is not None:
            codes, scales = holder.packed(self.prefix)
        else:
            codes, scales = self._param(Role.WEIGHT), self._param(Role.BLOCK_SCALE)
        out = []
        for section in self.sections:
            if section.rows is None:
                lead = (*section.lead, section.first.local_n[1], -1)
                out.append(QuantizedStack(codes.view(lead), scales.view(lead), decode.view(section.lead)))
                continue
            (index,) = section.first.scalar
            rows = section.rows
            out.append(
                QuantizedStack(codes[rows][None, None], scales[rows][None, None], decode[index : index + 1].view(1, 1))
            )
        return out

    def write_packed(
        self, fields: Sequence[dict[str, Tensor]], receipts: Sequence[Receipt], holder: WeightHolder | None
    ) -> None:
        """Write whole packed fields of each section; its receipt gets the digests of what was written."""
        if holder is not None:
            section, own = self.sections[0], fields[0]
            if section.is_whole:
                stack = QuantizedStack(own["codes"], own["scales"], own["global"])
            else:
                stack = section.packed(own)
            holder.install(self.prefix, stack, None, receipts[0], section.place)
            return
        for section, arrived, kept, receipt in zip(self.sections, fields, self.stored(), receipts, strict=True):
            shard = section.packed(arrived)
            for source, target in zip(shard, kept, strict=True):
                if source.dtype == torch.float8_e4m3fn:  # it has few kernels
                    source, target = source.view(torch.uint8), target.view(torch.uint8)
                target.copy_(source)
            section.digest(kept, receipt.digests)

    def write_quantized(
        self,
        fields: Sequence[dict[str, Tensor]],
        amax: Tensor,
        receipts: Sequence[Receipt],
        holder: WeightHolder | None,
    ) -> None:
        """Quantize whole float weights of each section with amax [E, P]; its receipt gets the digests of the result."""
        if holder is not None:
            section = self.sections[0]
            holder.install(self.prefix, section.shard("float", fields[0]["float"]), amax, receipts[0], section.place)
            return
        for section, arrived, kept, receipt in zip(self.sections, fields, self.stored(), receipts, strict=True):
            weight = section.shard("float", arrived["float"])
            quantize_stack(weight if weight.is_contiguous() else weight.contiguous(), amax, out=kept)
            section.digest(kept, receipt.digests)

    def receipts(self, digests: Sequence[Tensor], status: Tensor) -> list[Receipt]:
        """For `write_*`: digests int64 [matrices] of each section, zero, and a status int32 [1]."""
        decode = self._param(Role.DECODE_SCALE)
        return [
            Receipt(d, status, decode if s.rows is None else decode[s.first.scalar[0] :][:1])
            for s, d in zip(self.sections, digests, strict=True)
        ]

    def shared_amax(self, fields: Sequence[dict[str, Tensor]]) -> Tensor:
        """Largest magnitude of the parts that share a global scale, float32 [E, P]; NaN or Inf if they hold one."""
        weights = [arrived["float"] for arrived in fields]
        lead = self.sections[0].lead
        if len(weights) == 1:
            amax = torch.zeros(lead[0], dtype=torch.float32, device=weights[0].device)
            return stack_amax(weights[0], amax)[:, None].expand(lead)
        amax = weight_amax(weights)
        return amax.amax(dim=1, keepdim=True).expand(amax.shape)

    def write_input_scales(self, fields: Sequence[dict[str, Tensor]], arrived: Sequence[set[str]]) -> None:
        """Static activation scales (decode direction), of those matrices for which one was sent."""
        for section, values, present in zip(self.sections, fields, arrived, strict=True):
            if not present:
                continue
            for i, matrix in enumerate(section.matrices):
                if matrix.name in present:
                    self.runtime.loader.set_input_scale(matrix, values["input"].flatten()[i])

    def watch_input_scales(
        self, fields: Sequence[dict[str, Tensor]], arrived: Sequence[set[str]], flags: Flags
    ) -> None:
        """Look for damage in the static activation scales that were sent."""
        for section, values, present in zip(self.sections, fields, arrived, strict=True):
            for i, matrix in enumerate(section.matrices if present else ()):
                if matrix.name in present:
                    what = f"{matrix.name}.input_scale: expected a finite, positive scale"
                    flags.add("global", values["input"].flatten()[i], what)

    def watch(self, fields: Sequence[dict[str, Tensor]], flags: Flags, *, at_once: bool) -> None:
        """Look for damage in packed fields; at_once: they stay as they are until the flags are checked."""
        for arrived in fields:
            scales = arrived["scales"].view(torch.uint8).amax()
            flags.add("scale", scales, f"{self.name}.weight_scale: holds NaN or negative block scales")
            scalars = arrived["global"]
            if not at_once:  # the sender may overwrite its memory before the check
                scalars = scalars.clone()
            flags.add("global", scalars, f"{self.name}.weight_scale_2: expected finite, positive scales")

    def _param(self, role: Role) -> Tensor:
        param: Tensor = getattr(self.runtime.layer, self.prefix + role.value).data
        return param


def units_of(key: str, runtime: LayerRuntime) -> list[Unit]:
    """The units of a quantized layer."""
    matrices = runtime.loader.matrices
    if not isinstance(runtime, ExpertsRuntime):
        sections = [Section((m,), (1, 1), m.rows[0]) for m in matrices]  # type: ignore[arg-type]
        return [Unit(key, runtime, "", sections)]
    units = []
    for prefix, parts in (("w13_", 2), ("w2_", 1)):
        chosen = tuple(m for m in matrices if m.prefix == prefix)
        units.append(Unit(key, runtime, prefix, [Section(chosen, (len(chosen) // parts, parts), None)]))
    return units
