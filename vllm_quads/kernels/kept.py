# SPDX-License-Identifier: Apache-2.0
"""A quantized weight that stays on the GPU and is renewed there when its weight has changed, without a host sync.

Besides the result, position-weighted checksums of the weight are kept. A check reads the weight (or a sixteenth of it,
another one each time), compares on the device, and the kernels that follow do nothing unless the comparison failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_quads.kernels import weights as w
from vllm_quads.kernels._native import on_device
from vllm_quads.kernels.weights import QuantizedStack

_CLASSES = 16
"""Classes of tiles with a checksum of their own (`weights_triton.CLASSES`)."""
_SMALL = 1 << 20
"""Weights with fewer elements are always checked as a whole."""


class KeptQuantization:
    """Quantized form of one weight or stack [..., N, K]: packed, or dequantized in the weight's dtype."""

    def __init__(self, weight: Tensor, *, dense: bool) -> None:
        """Allocate for a weight of this shape, dtype and device; nothing is computed. Needs Triton (`available`)."""
        triton = w._kernels()
        assert triton is not None
        self._triton = triton
        self._form = (weight.shape, weight.dtype, weight.device)
        lead = weight.shape[:-2]
        matrices = max(1, lead.numel())
        words = (matrices + 1) // 2
        self._state = torch.zeros(2 * _CLASSES + 1 + words, dtype=torch.int64, device=weight.device)
        self._sums = self._state[:_CLASSES]
        self._amax = self._state[_CLASSES : _CLASSES + words].view(torch.int32)[:matrices]
        self._old = self._state[: _CLASSES + words]  # sums and amax: cleared at once
        self._fresh = self._state[_CLASSES + words : 2 * _CLASSES + words]
        self._stale = self._state[2 * _CLASSES + words :].view(torch.int32)[:1]
        self.amax: Tensor = self._amax.view(torch.float32).view(lead)
        """float32 [...]: amax of the weight and of those that share its scale; NaN or Inf if one is not finite."""
        self.values: Tensor | None = torch.empty_like(weight, memory_format=torch.contiguous_format) if dense else None
        self.packed: QuantizedStack | None = None if dense else w._empty_packed(weight)
        self._outputs = w._Outputs.of(self.packed, self.values)
        self._turn = 0

    @staticmethod
    def available(weight: Tensor) -> bool:
        """True where the kernels run."""
        return w._triton(weight) is not None

    def fits(self, weight: Tensor) -> bool:
        """True if this can hold the quantization of a weight of this shape, dtype and device."""
        return self._form == (weight.shape, weight.dtype, weight.device)

    def renew(self, sources: Sequence[Tensor], frozen: Tensor | None = None, *, values: Tensor | None = None) -> None:
        """Quantize sources[0]; the others share its scale.

        frozen: amax float32 [...] to take the scale from. values: of a packed form the dequantized weight is written
        there as well, in the same pass.
        """
        self._old.zero_()
        outputs = self._outputs if values is None else w._Outputs.of(self.packed, values)
        self._renew([w._Operand.of(s) for s in sources], frozen, outputs, guard=None)
        held = self.values if self.values is not None else self.packed[0]  # type: ignore[index]
        torch.autograd.graph.increment_version(held)  # a graph that saved the old values must not use the new ones

    def renew_if_changed(self, sources: Sequence[Tensor], frozen: Tensor | None = None, *, whole: bool = True) -> None:
        """Renew on the device if the contents of the sources differ from those of the last time.

        whole=False looks at every 16th tile of 2048 weights, at others each time: after 16 calls at all of them. That
        notices at once whatever changes a weight at large, as an optimizer or an exchange of weights does.
        """
        self._check(sources, frozen, *((0, _CLASSES) if whole else self._next_part(sources[0].numel())))

    def _next_part(self, elements: int) -> tuple[int, int]:
        """Classes first <= c < last that are checked next in a weight with this many elements."""
        if elements < _SMALL:
            return 0, _CLASSES
        turn, self._turn = self._turn, (self._turn + 1) % _CLASSES
        return turn, turn + 1

    def _check(self, sources: Sequence[Tensor], frozen: Tensor | None, first: int, last: int) -> None:
        operands = [w._Operand.of(s) for s in sources]
        for salt, operand in enumerate(operands):
            self._checksum(operand, salt, self._fresh, None, first, last)
        with on_device(self._state.device):
            self._triton.compare_kernel[(1,)](
                self._sums, self._fresh, self._stale, self._amax, self._amax.numel(), first, last, num_warps=1
            )
        self._renew(operands, frozen, self._outputs, guard=self._stale)

    def _renew(
        self, operands: Sequence[w._Operand], frozen: Tensor | None, outputs: w._Outputs, guard: Tensor | None
    ) -> None:
        for salt, operand in enumerate(operands):
            self._checksum(operand, salt, self._sums, guard, 0, _CLASSES, amax=True)
        amax = self.amax if frozen is None else frozen
        w._quantize(self._triton, operands[0], amax, outputs, guard)

    def _checksum(
        self,
        operand: w._Operand,
        salt: int,
        sums: Tensor,
        guard: Tensor | None,
        first: int,
        last: int,
        *,
        amax: bool = False,
    ) -> None:
        geometry = operand.geometry
        w._launch(
            self._triton.checksum_kernel,
            geometry,
            operand.matrices,
            *(operand.words, self._amax, sums, self._stale if guard is None else guard),
            *(geometry.blocks, geometry.per_row, *geometry.strides[0], salt, first, last),
            DTYPE=operand.dtype,
            FLAT=geometry.flat,
            AMAX=amax,
            GUARDED=guard is not None,
        )
