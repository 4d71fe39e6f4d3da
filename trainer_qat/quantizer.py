# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of one parameter, with the scale that its siblings share and the cache of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer_qat.cache import CacheMode, WeightCache, cache_of
from trainer_qat.fake_quant import ClampedStraightThrough, StraightThrough, fake_quantize, matrix_amax
from trainer_qat.finite import WATCH
from trainer_qat.schedule import Progress, RampedClamp, mix_weight
from vllm_quads.kernels import weights as kernels
from vllm_quads.kernels.kept import KeptQuantization
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor, QuantizedSet, weight_amax


@dataclass
class QatState:
    """What all quantizers of one model share."""

    contract: Contract
    quantized: QuantizedSet
    cache: CacheMode
    clamp_gradient: bool
    progress: Progress = field(default_factory=Progress)
    """Where the schedule stands."""
    scale_decay: float = 0.99
    """Decay of WeightGlobalScale.MOVING_AVERAGE."""
    w4a4_ablation: bool = False
    """Activations are quantized as well: symmetric QAT, to compare with."""
    enabled: bool = True
    sharded: bool = False
    """True while the root of the model is an FSDP2 unit."""

    @property
    def computes(self) -> bool:
        """False while fake quantization is switched off, or has not set in yet."""
        return self.enabled and self.progress.active

    def cache_mode(self) -> CacheMode:
        """The mode in force."""
        if self.cache is CacheMode.AUTO:
            return CacheMode.NONE if self.sharded else CacheMode.DENSE
        return self.cache


@dataclass
class WeightQuantizer:
    """Fake-quantizes one parameter: a Linear's weight [N, K], or a stack of experts [E, N, K]."""

    name: str
    """Canonical name of the weight or stack."""
    matrices: tuple[str, ...]
    """Canonical names of the matrices it holds."""
    state: QatState
    siblings: tuple[nn.Linear, ...] = ()
    """Linears that share one global scale, this one included; empty for a stack (gate and up are one matrix there)."""
    frozen: Tensor | None = None
    """float32 amax, [E] or a scalar, that the global scale is taken from unless it is live."""
    cache: WeightCache = field(default_factory=WeightCache)

    def sources(self, weight: Tensor) -> list[Tensor]:
        """The weight, then the siblings whose amax its scale depends on."""
        if self.frozen is not None:
            return [weight]
        return [weight, *(s.weight for s in self.siblings if s.weight is not weight)]

    def amax(self, weight: Tensor) -> Tensor:
        """amax float32 [...] that the global scale of this weight is taken from.

        Raises FormatError on NaN or Inf, on a GPU later (`trainer_qat.finite`).
        """
        own = _amax(weight, self.name)
        if self.frozen is not None:
            return self.frozen.to(own.device)
        for sibling in self.sources(weight)[1:]:
            own = torch.maximum(own, _amax(sibling, self.name))
        return own

    def packed(self, weight: Tensor) -> PackedTensor:
        """Codes and scales of the weight as it is now, for a push or an export: the packed cache's if there is one.

        The tensors are the cache's own; copy them to keep them beyond the next optimizer step. Raises FormatError on
        NaN or Inf, on a GPU later (`trainer_qat.finite`).
        """
        if self.state.cache_mode() is CacheMode.PACKED and not _sharded(self.sources(weight)):
            packed, amax = self.kept(weight)
            _watch(amax, self.name)
            return packed
        with torch.inference_mode(False), torch.no_grad():
            return kernels.quantize_stack(weight.detach(), self.amax(weight)).packed(self.name)

    def kept(self, weight: Tensor) -> tuple[PackedTensor, Tensor]:
        """What the packed cache holds of the weight as it is now, and an amax float32 [...].

        On a GPU the amax is the weight's own and its siblings', NaN or Inf if one of them is not finite: for the caller
        to look at. On a CPU, where that raises FormatError at once, it is the one of the scale.
        """
        with torch.inference_mode(False), torch.no_grad():
            sources = self.sources(weight)
            if KeptQuantization.available(weight):
                frozen = None if self.frozen is None else self.frozen.to(weight.device)
                kept, _ = self.cache.on_device(sources, frozen, dense=False, whole=True)
                assert kept.packed is not None
                return kept.packed.packed(self.name), kept.amax
            amax, value = self._kept_by_reference(sources, CacheMode.PACKED)
            assert isinstance(value, PackedTensor)
            return value, amax

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as the rollout has it, in the weight's dtype; its gradient goes straight to `weight`."""
        if not self.state.computes:
            return weight
        if isinstance(weight, DTensor):
            raise ContractError(
                f"{self.name}: reaches the forward pass as a shard; QUADS quantizes full weights, so shard the model "
                f"with FSDP2 (`fully_shard`), which gathers them, and not with tensor parallelism"
            )
        whole = not torch.is_grad_enabled()
        # Out of inference mode too: what is kept from a scoring pass must be usable in a training pass.
        with torch.inference_mode(False), torch.no_grad():
            amax, quantized = self._quantized(weight, whole)
            if self.state.progress.ramping:
                quantized = mix_weight(weight, quantized, self.state.progress.strength)
        if self.state.clamp_gradient:
            amax = self.amax(weight) if amax is None else amax
            if self.state.progress.ramping:
                strength = self.state.progress.strength
                return cast(Tensor, RampedClamp.apply(weight, quantized, amax, strength))
            return cast(Tensor, ClampedStraightThrough.apply(weight, quantized, amax))
        return cast(Tensor, StraightThrough.apply(weight, quantized))

    def _quantized(self, weight: Tensor, whole: bool) -> tuple[Tensor | None, Tensor]:
        """(amax that the scale is taken from, if at hand; dequantized weight). whole: see `WeightCache.on_device`."""
        mode = self.state.cache_mode()
        sources = self.sources(weight)
        # The ranks must not disagree on whether a collective runs.
        if mode is not CacheMode.NONE and not _sharded(sources):
            if torch.compiler.is_compiling():
                frozen = None if self.frozen is None else self.frozen.to(weight.device)
                return None, cached_weight(weight, sources[1:], frozen, self.name, self.cache.handle, whole)
            if not KeptQuantization.available(weight):
                amax, value = self._kept_by_reference(sources, mode)
                return amax, value.dequantize(weight.dtype) if isinstance(value, PackedTensor) else value
            if not _capturing(weight):
                if mode is CacheMode.PACKED:
                    amax, values = dequantized_on_device(self.cache, sources, self.frozen, self.name, whole=whole)
                else:
                    kept = kept_on_device(self.cache, sources, self.frozen, self.name, dense=True, whole=whole)
                    assert kept.values is not None
                    amax, values = kept.amax, kept.values
                return amax if self.frozen is None else self.frozen.to(weight.device), values
        amax = self.amax(weight)
        return amax, fake_quantize(weight, amax, self.name)

    def _kept_by_reference(self, sources: list[Tensor], mode: CacheMode) -> tuple[Tensor, Tensor | PackedTensor]:
        """(amax, dequantized or packed weight) from the cache, or quantized by the reference path."""
        wanted = Tensor if mode is CacheMode.DENSE else PackedTensor
        kept = self.cache.get(sources, self.frozen)
        if isinstance(kept, wanted) and self.cache.amax is not None:
            return self.cache.amax, kept
        amax = self.amax(sources[0])
        value: Tensor | PackedTensor
        if mode is CacheMode.DENSE:
            value = fake_quantize(sources[0], amax, self.name)
        else:
            value = PackedTensor.quantize(sources[0], amax=amax, name=self.name)
        self.cache.put(sources, value, amax, self.frozen)
        return amax, value


def kept_on_device(
    cache: WeightCache, sources: list[Tensor], frozen: Tensor | None, name: str, *, dense: bool, whole: bool
) -> KeptQuantization:
    """The quantization that a cache keeps of sources[0] on a GPU, as it is now; NaN and Inf are watched for."""
    frozen = None if frozen is None else frozen.to(sources[0].device)
    kept, _ = cache.on_device(sources, frozen, dense=dense, whole=whole)
    _watch(kept.amax, name)
    return kept


def dequantized_on_device(
    cache: WeightCache, sources: list[Tensor], frozen: Tensor | None, name: str, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """(amax, dequantized weight, a new tensor) out of the packed form that a cache keeps; as `kept_on_device`."""
    weight = sources[0]
    frozen = None if frozen is None else frozen.to(weight.device)
    values = torch.empty_like(weight, memory_format=torch.contiguous_format)
    kept, written = cache.on_device(sources, frozen, dense=False, whole=whole, values=values)
    _watch(kept.amax, name)
    assert kept.packed is not None
    return kept.amax, values if written else kernels.dequantize_stack(kept.packed, out=values)


def _watch(amax: Tensor, name: str) -> None:
    if amax.is_cuda:
        WATCH.add(name, amax)
    else:
        weight_amax(amax[..., None, None], name)


@torch.library.custom_op("quads::cached_weight", mutates_args=())
def cached_weight(
    weight: Tensor, siblings: list[Tensor], frozen: Tensor | None, name: str, handle: int, whole: bool
) -> Tensor:
    """Dequantized weight in the weight's dtype, out of the packed cache of that handle if it exists.

    What a compiled graph calls. The result is a new tensor: a graph may write over what an operator has returned.
    """
    cache = cache_of(handle)
    sources = [weight, *siblings]
    if cache is not None and KeptQuantization.available(weight) and not _capturing(weight):
        return dequantized_on_device(cache, sources, frozen, name, whole=whole)[1]
    reference = cache is not None and not KeptQuantization.available(weight)
    value = cache.get(sources, frozen) if cache is not None and reference else None
    if isinstance(value, PackedTensor):
        return value.dequantize(weight.dtype)
    amax = torch.stack([_amax(s, name) for s in sources]).amax(dim=0) if frozen is None else frozen
    if cache is None or not reference:
        return kernels.fake_quantize_stack(weight, amax)
    packed = PackedTensor.quantize(weight, amax=amax, name=name)
    cache.put(sources, packed, amax, frozen)
    return packed.dequantize(weight.dtype)


@cached_weight.register_fake
def _(weight: Tensor, siblings: list[Tensor], frozen: Tensor | None, name: str, handle: int, whole: bool) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _sharded(weights: Sequence[Tensor]) -> bool:
    return any(isinstance(w, DTensor) for w in weights)


def _capturing(weight: Tensor) -> bool:
    """True during the capture of a CUDA graph: its replays run none of the cache's decisions."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _amax(weight: Tensor, name: str) -> Tensor:
    """amax float32 [...] of each full [N, K] matrix; on a GPU NaN and Inf are watched for and not yet refused."""
    if isinstance(weight, DTensor):
        # One value per matrix travels, not the weight.
        amax = cast(DTensor, shard_amax(weight)).full_tensor()
        if not amax.is_cuda:
            return weight_amax(amax[..., None, None], name)
        amax = amax.to(torch.bfloat16).to(torch.float32)  # the kernels of `matrix_amax` take whole matrices
        WATCH.add(name, amax)
        return amax
    return cast(Tensor, matrix_amax(weight.detach(), name))


def shard_amax(weight: Tensor) -> Tensor:
    """max |W| [...] of this rank's part of each matrix of a sharded weight [..., N, K], sharded like it; unrounded."""
    return weight.detach().abs().amax(dim=(-2, -1))


def full_amax(weight: Tensor, name: str) -> Tensor:
    """amax float32 [...] of each full [N, K] matrix of a weight [..., N, K], whether or not it is sharded.

    Raises FormatError on NaN or Inf; on a GPU this waits for it.
    """
    return weight_amax(_amax(weight, name)[..., None, None], name)


def shared_amax(weights: Sequence[Tensor], name: str) -> Tensor:
    """Largest `full_amax` of weights that share a scale."""
    return torch.stack([full_amax(w, name) for w in weights]).amax(dim=0)
