# SPDX-License-Identifier: Apache-2.0
"""Quantized once per optimizer step: the cache of fake-quantized weights.

An entry is used only if nothing says that a weight changed since: same storage object, same version counter, and same
contents. The contents have to be looked at, because two common kinds of update leave the version counter alone: fused
optimizers, and in-place edits through `.data` (EMA swaps, Megatron- and DeepSpeed-style master copies); under FSDP2
every all-gather does, too. A 64-bit sum of each row costs one read of the weight, about a thousandth of quantizing it
with the reference path on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_quads.nvfp4 import PackedTensor


class CacheMode(str, Enum):
    """What is kept of a quantized weight between forward passes."""

    AUTO = "auto"
    """DENSE, or NONE under FSDP2, where a kept copy would be the whole unsharded weight."""
    NONE = "none"
    """Nothing: quantize in every forward pass, and again when gradient checkpointing recomputes one."""
    DENSE = "dense"
    """The dequantized weight in the weight's dtype: +100 % of the quantized weights' bytes (autograd keeps the same
    tensor for the backward pass anyway, so the peak without gradient checkpointing does not grow)."""
    PACKED = "packed"
    """Codes and scales: +28 % of the BF16 bytes, and a dequantization per use."""


def row_sums(weight: Tensor) -> Tensor:
    """Sum of each row's 64-bit words modulo 2^64, int64 [..., N]; K * itemsize is a multiple of 8 for NVFP4 weights."""
    return weight.detach().contiguous().view(torch.int64).sum(dim=-1)


@dataclass(frozen=True)
class _Stamp:
    """Identity, version and contents of one weight."""

    storage: StorageWeakRef
    place: tuple[Any, ...]
    rows: Tensor

    @staticmethod
    def of(weight: Tensor) -> _Stamp:
        return _Stamp(StorageWeakRef(weight.untyped_storage()), _place(weight), row_sums(weight))

    def matches(self, weight: Tensor) -> bool:
        # A weak reference keeps the storage's address from being used again, so equal addresses are the same storage.
        same = self.storage.cdata == weight.untyped_storage()._cdata and self.place == _place(weight)
        return same and torch.equal(self.rows, row_sums(weight))


def _place(weight: Tensor) -> tuple[Any, ...]:
    return (weight._version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device)


@dataclass
class WeightCache:
    """Holds the quantized form of one weight, stamped with the weights that it was computed from."""

    _stamps: tuple[_Stamp, ...] = ()
    _value: Tensor | PackedTensor | None = field(default=None, repr=False)
    hits: int = 0
    misses: int = 0

    def get(self, sources: Sequence[Tensor]) -> Tensor | PackedTensor | None:
        """The kept value if it was computed from exactly these weights (the weight and its scale siblings)."""
        same = len(sources) == len(self._stamps)
        if same and all(stamp.matches(source) for stamp, source in zip(self._stamps, sources, strict=True)):
            self.hits += 1
            return self._value
        self.misses += 1
        return None

    def put(self, sources: Sequence[Tensor], value: Tensor | PackedTensor) -> None:
        """Keep a value computed from these weights."""
        self._stamps = tuple(_Stamp.of(source) for source in sources)
        self._value = value

    def clear(self) -> None:
        """Forget the value."""
        self._stamps, self._value = (), None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()  # a copy has weights of its own

    def __getstate__(self) -> dict[str, Any]:
        return WeightCache().__dict__
