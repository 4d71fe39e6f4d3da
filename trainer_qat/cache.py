# SPDX-License-Identifier: Apache-2.0
"""Quantized once per optimizer step: the cache of fake-quantized weights.

An entry is used only if nothing says that a weight changed since: same storage object, same version counter, no
optimizer step, and same contents. The contents have to be looked at, because in-place edits through `.data` (EMA
swaps, Megatron- and DeepSpeed-style master copies) leave the version counter alone; under FSDP2 every all-gather does.

On a CPU a 64-bit sum of each row is compared, which costs about a thousandth of quantizing with the reference path. On
a GPU the comparison and what follows from it stay on the device (`vllm_quads.kernels.kept`), so the host never waits:

- after an optimizer step, or if storage or version differ, the weight is quantized anew;
- else in a pass with gradients a sixteenth of the weight is looked at, another one each time: whatever changes a weight
  at large is noticed at once, an edit of a few elements through `.data` at the latest at the next optimizer step or the
  16th pass;
- in a pass without gradients, and for a push, all of the weight is looked at;
- a recomputation within the backward pass (gradient checkpointing) uses what its forward pass used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from vllm_quads.kernels.kept import KeptQuantization
from vllm_quads.nvfp4 import PackedTensor


class CacheMode(str, Enum):
    """What is kept of a quantized weight between forward passes."""

    AUTO = "auto"
    """DENSE, or NONE under FSDP2, where a kept copy would be the whole unsharded weight."""
    NONE = "none"
    """Nothing: quantize in every forward pass, and again when gradient checkpointing recomputes one."""
    DENSE = "dense"
    """The dequantized weight in the weight's dtype: +100 % of the quantized weights' bytes (autograd keeps the same
    tensor for the backward pass anyway, so the peak without gradient checkpointing does not grow). Compiled graphs
    keep codes and scales instead (PACKED): a graph may not hand out a tensor that it does not own."""
    PACKED = "packed"
    """Codes and scales: +28 % of the BF16 bytes, and a dequantization per use."""


def row_sums(weight: Tensor) -> Tensor:
    """Checksum of each row, int64 [..., N]; K * itemsize is a multiple of 8 for NVFP4 weights.

    The sum of its 64-bit words modulo 2^64, each folded, or two flipped top bits would cancel, and times an odd number
    of its own, or words could change places.
    """
    words = weight.detach().contiguous().view(torch.int64)
    folded = (words >> 32).bitwise_xor_(words)
    places = torch.arange(1, 2 * folded.shape[-1], 2, device=folded.device)
    return folded.mul_(places).sum(dim=-1)


def in_backward() -> bool:
    """True while autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Steps:
    """Counts optimizer steps of the whole process, of any torch optimizer; fused ones bump no version counter."""

    count = 0
    last: ClassVar[weakref.WeakKeyDictionary[Optimizer, int]] = weakref.WeakKeyDictionary()
    """The count at each optimizer's last step."""
    _hooked = False

    @classmethod
    def now(cls) -> int:
        """Steps so far, counted from the first call on."""
        if not cls._hooked:
            cls._hooked = True
            register_optimizer_step_post_hook(cls._step)
        return cls.count

    @classmethod
    def _step(cls, optimizer: Optimizer, *_: Any) -> None:
        cls.count += 1
        cls.last[optimizer] = cls.count


def optimizer_steps() -> int:
    """Steps of any torch optimizer in this process, counted from the first call on."""
    return _Steps.now()


def optimizers_since(steps: int) -> list[Optimizer]:
    """The optimizers that have stepped since `optimizer_steps` gave this number."""
    return [optimizer for optimizer, last in list(_Steps.last.items()) if last > steps]


@dataclass(frozen=True)
class _Identity:
    """Which tensor this is, as far as the host can tell."""

    storage: StorageWeakRef
    place: tuple[Any, ...]

    @staticmethod
    def of(weight: Tensor) -> _Identity:
        return _Identity(StorageWeakRef(weight.untyped_storage()), _place(weight))

    def matches(self, weight: Tensor) -> bool:
        # A weak reference keeps the storage's address from being used again, so equal addresses are the same storage.
        return self.storage.cdata == weight.untyped_storage()._cdata and self.place == _place(weight)


def _place(weight: Tensor) -> tuple[Any, ...]:
    # Not the address: FSDP2 frees and fills the memory of one and the same storage.
    return (weight._version, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype, weight.device)


def _unchanged(identity: _Identity | None, frozen: Tensor | None) -> bool:
    """True if a frozen scale is the one of that identity; such a scale is changed by torch operations alone."""
    return frozen is None if identity is None else frozen is not None and identity.matches(frozen)


@dataclass(frozen=True)
class _Stamp:
    """Identity and contents of one weight."""

    identity: _Identity
    rows: Tensor

    @staticmethod
    def of(weight: Tensor) -> _Stamp:
        return _Stamp(_Identity.of(weight), row_sums(weight))

    def matches(self, weight: Tensor) -> bool:
        return self.identity.matches(weight) and torch.equal(self.rows, row_sums(weight))


@dataclass
class _OnDevice:
    """A quantization kept on the GPU, and what it was computed from."""

    kept: KeptQuantization
    identities: tuple[_Identity, ...] = ()
    scale: _Identity | None = None
    step: int = -1

    def is_of(self, sources: Sequence[Tensor], frozen: Tensor | None) -> bool:
        same = len(sources) == len(self.identities) and _unchanged(self.scale, frozen)
        return same and all(i.matches(s) for i, s in zip(self.identities, sources, strict=True))


_HANDLES = itertools.count()
_CACHES: weakref.WeakValueDictionary[int, WeightCache] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class WeightCache:
    """Holds the quantized form of one weight, and knows which weights it was computed from."""

    _stamps: tuple[_Stamp, ...] = ()
    _scale: _Identity | None = None
    _value: Tensor | PackedTensor | None = field(default=None, repr=False)
    amax: Tensor | None = field(default=None, repr=False)
    """float32 [...]: amax that the kept value's global scale was taken from (reference path)."""
    _on_device: dict[bool, _OnDevice] = field(default_factory=dict, repr=False)
    hits: int = 0
    misses: int = 0
    handle: int = field(default_factory=lambda: next(_HANDLES))
    """Number under which a compiled graph finds this cache (`cache_of`)."""

    def __post_init__(self) -> None:
        _CACHES[self.handle] = self

    # -- with the reference path ----------------------------------------------------------------------------------

    def get(self, sources: Sequence[Tensor], frozen: Tensor | None = None) -> Tensor | PackedTensor | None:
        """The kept value if it was computed from exactly these weights (the weight and its scale siblings).

        frozen: amax that the scale is taken from instead.
        """
        same = len(sources) == len(self._stamps) and _unchanged(self._scale, frozen)
        if same and all(stamp.matches(source) for stamp, source in zip(self._stamps, sources, strict=True)):
            self.hits += 1
            return self._value
        self.misses += 1
        return None

    def put(
        self, sources: Sequence[Tensor], value: Tensor | PackedTensor, amax: Tensor, frozen: Tensor | None = None
    ) -> None:
        """Keep a value computed from these weights with this amax."""
        self._stamps = tuple(_Stamp.of(source) for source in sources)
        self._scale = None if frozen is None else _Identity.of(frozen)
        self._value, self.amax = value, amax

    # -- on a GPU -------------------------------------------------------------------------------------------------

    def on_device(
        self,
        sources: Sequence[Tensor],
        frozen: Tensor | None,
        *,
        dense: bool,
        whole: bool,
        values: Tensor | None = None,
    ) -> tuple[KeptQuantization, bool]:
        """The quantization of sources[0] as it is now; the others share its scale.

        frozen: amax to take the scale from instead. whole: look for changes in all of the weight, not in a sixteenth.
        values: where the dequantized weight is wanted; the second result says whether it has been written there, which
        costs little while a packed form is renewed.
        """
        entry = self._on_device.get(dense)
        step = _Steps.now()
        recomputing = in_backward()
        if entry is not None and entry.is_of(sources, frozen) and (entry.step == step or recomputing):
            self.hits += 1
            if not recomputing:
                entry.kept.renew_if_changed(sources, frozen, whole=whole)
            return entry.kept, False
        self.misses += 1
        if entry is None or not entry.kept.fits(sources[0]):
            entry = self._on_device[dense] = _OnDevice(KeptQuantization(sources[0], dense=dense))
        entry.kept.renew(sources, frozen, values=values)
        entry.identities, entry.step = tuple(_Identity.of(s) for s in sources), step
        entry.scale = None if frozen is None else _Identity.of(frozen)
        return entry.kept, values is not None

    # -- both -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the value."""
        self._stamps, self._value, self.amax = (), None, None
        self._on_device.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()  # a copy has weights of its own

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


def cache_of(handle: int) -> WeightCache | None:
    """The cache of that number, if it still exists."""
    return _CACHES.get(handle)
