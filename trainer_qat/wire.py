# SPDX-License-Identifier: Apache-2.0
"""One quantized weight on its way to an engine: its tensors' names and shapes, and what its digests count for.

Nothing here depends on values, so it is worked out once per model; a push only looks it up.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trainer_qat.inventory import Weight
from vllm_quads.kernels.weights import QuantizedStack, digest_stack
from vllm_quads.nvfp4 import BLOCK_SIZE, name_weights, unit_of
from vllm_quads.refit import TensorSpec


class Wire:
    """How one weight [N, K], or stack of experts [E, N, K], travels (see `refit.Manifest`)."""

    def __init__(self, weight: Weight) -> None:
        """Takes name and shape of the weight."""
        self.shape = tuple(weight.tensor.shape)
        self.matrices = tuple(weight.matrices)
        self.unit = unit_of(self.matrices[0])
        """The unit that its matrices belong to."""
        stacked = len(self.shape) == 3
        self.name = weight.name if stacked else f"{weight.name}.weight"
        """`...experts.gate_up_proj` for a stack, `...q_proj.weight` for a matrix."""
        self.module = self.name.removesuffix(".weight")
        self.parts = len(self.matrices) // self.shape[0] if stacked else 1
        """Matrices per expert: 2 for gate and up."""
        self.scalars = self._scalars(stacked)
        """Shape of the global scales: [E, 2] for gate and up, [E] for down, a scalar for a matrix."""

    def _scalars(self, stacked: bool) -> tuple[int, ...]:
        if not stacked:
            return ()
        return (self.shape[0], self.parts) if self.parts > 1 else (self.shape[0],)

    @cached_property
    def packed_specs(self) -> dict[str, TensorSpec]:
        """Of the packed tensors, in the order of sending."""
        *lead, n, k = self.shape
        # The largest comes last: what arrives before a layer is complete may have to be copied.
        return {
            f"{self.module}.weight_scale_2": TensorSpec(self.scalars, torch.float32),
            f"{self.module}.weight_scale": TensorSpec((*lead, n, k // BLOCK_SIZE), torch.float8_e4m3fn),
            f"{self.module}.weight": TensorSpec((*lead, n, k // 2), torch.uint8),
        }

    @cached_property
    def float_specs(self) -> dict[str, TensorSpec]:
        """Of the BF16 weight."""
        return {self.name: TensorSpec(self.shape, torch.bfloat16)}

    def decode_scales(self, stack: QuantizedStack) -> Tensor:
        """One decode scale for each matrix, float32 of shape `scalars`, contiguous."""
        decode = stack.decode_scale
        return decode[:, None].expand(self.scalars).contiguous() if self.parts > 1 else decode

    def packed(self, stack: QuantizedStack, decode: Tensor) -> dict[str, Tensor]:
        """The tensors that `packed_specs` promises; decode: what `decode_scales` gave."""
        return dict(zip(self.packed_specs, (decode, stack.block_scales, stack.codes), strict=True))

    @cached_property
    def name_weights(self) -> Tensor:
        """What the digest of each matrix is multiplied with in that of the unit, int64 [matrices] on the CPU."""
        return name_weights(self.matrices)

    def digests(self, stack: QuantizedStack, decode: Tensor) -> Tensor:
        """Digest of each matrix, int64 [matrices]; decode: what `decode_scales` gave."""
        codes, scales = stack.codes, stack.block_scales
        if self.parts > 1:  # expert by expert, gate and up: [E, P, N, ...]
            codes, scales = codes.unflatten(1, (self.parts, -1)), scales.unflatten(1, (self.parts, -1))
        return digest_stack(QuantizedStack(codes, scales, decode)).flatten()


class UnitDigests:
    """Digests of the units that were sent: collected without waiting, added up on the device."""

    def __init__(self) -> None:
        self._sent: list[tuple[Wire, Tensor]] = []
        self._read: dict[str, int] | None = None

    def add(self, wire: Wire, digests: Tensor) -> None:
        """Count the digests int64 [matrices] of one weight."""
        self._sent.append((wire, digests))
        self._read = None

    def read(self) -> dict[str, int]:
        """Digest of each unit, 0 .. 2^64; waits for the device once."""
        if self._read is None:
            self._read = self._sum() if self._sent else {}
        return self._read

    def _sum(self) -> dict[str, int]:
        units = {unit: i for i, unit in enumerate(dict.fromkeys(wire.unit for wire, _ in self._sent))}
        device = self._sent[0][1].device
        weights = torch.cat([wire.name_weights for wire, _ in self._sent]).to(device)
        counts = torch.tensor([len(wire.matrices) for wire, _ in self._sent])
        index = torch.tensor([units[wire.unit] for wire, _ in self._sent]).repeat_interleave(counts).to(device)
        totals = torch.zeros(len(units), dtype=torch.int64, device=device)
        totals.index_add_(0, index, torch.cat([d.to(device) for _, d in self._sent]) * weights)
        return {unit: value % (1 << 64) for unit, value in zip(units, totals.tolist(), strict=True)}


__all__ = ["UnitDigests", "Wire"]
