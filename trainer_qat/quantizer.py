# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of one parameter, with the scale that its siblings share and the cache of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer_qat.cache import CacheMode, WeightCache
from trainer_qat.fake_quant import ClampedStraightThrough, StraightThrough, fake_quantize, matrix_amax
from trainer_qat.schedule import Progress, RampedClamp, mix_weight
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor, QuantizedSet


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
        """amax float32 [...] that the global scale of this weight is taken from. Raises FormatError on NaN or Inf."""
        own = full_amax(weight, self.name)
        if self.frozen is not None:
            return self.frozen.to(own.device)
        for sibling in self.sources(weight)[1:]:
            own = torch.maximum(own, full_amax(sibling, self.name))
        return own

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as the rollout has it, in the weight's dtype; its gradient goes straight to `weight`."""
        if not self.state.computes:
            return weight
        if isinstance(weight, DTensor):
            raise ContractError(
                f"{self.name}: reaches the forward pass as a shard; QUADS quantizes full weights, so shard the model "
                f"with FSDP2 (`fully_shard`), which gathers them, and not with tensor parallelism"
            )
        # Out of inference mode too: what is kept from a scoring pass must be usable in a training pass.
        with torch.inference_mode(False), torch.no_grad():
            amax, quantized = self._quantized(weight)
            if self.state.progress.ramping:
                quantized = mix_weight(weight, quantized, self.state.progress.strength)
        if self.state.clamp_gradient:
            amax = self.amax(weight) if amax is None else amax
            if self.state.progress.ramping:
                strength = self.state.progress.strength
                return cast(Tensor, RampedClamp.apply(weight, quantized, amax, strength))
            return cast(Tensor, ClampedStraightThrough.apply(weight, quantized, amax))
        return cast(Tensor, StraightThrough.apply(weight, quantized))

    def _quantized(self, weight: Tensor) -> tuple[Tensor | None, Tensor]:
        """(amax if it was needed, dequantized weight)."""
        mode = self.state.cache_mode()
        sources = self.sources(weight)
        # A graph must not capture a kept tensor; and the ranks must not disagree on whether a collective runs.
        if torch.compiler.is_compiling() or any(isinstance(s, DTensor) for s in sources):
            mode = CacheMode.NONE
        if mode is CacheMode.NONE:
            amax = self.amax(weight)
            return amax, fake_quantize(weight, amax, self.name)
        kept = self.cache.get(sources)
        if isinstance(kept, Tensor) and mode is CacheMode.DENSE:
            return None, kept
        if isinstance(kept, PackedTensor) and mode is CacheMode.PACKED:
            return None, kept.dequantize(weight.dtype)
        amax = self.amax(weight)
        if mode is CacheMode.DENSE:
            dense = fake_quantize(weight, amax, self.name)
            self.cache.put(sources, dense)
            return amax, dense
        packed = PackedTensor.quantize(weight, amax=amax, name=self.name)
        self.cache.put(sources, packed)
        return amax, packed.dequantize(weight.dtype)


def full_amax(weight: Tensor, name: str) -> Tensor:
    """amax float32 [...] of each full [N, K] matrix of a weight [..., N, K], whether or not it is sharded."""
    if isinstance(weight, DTensor):
        # One value per matrix travels, not the weight.
        amax = cast(DTensor, weight.detach().abs().amax(dim=(-2, -1))).full_tensor()
        weight = amax[..., None, None]
    return cast(Tensor, matrix_amax(weight.detach(), name))


def shared_amax(weights: Sequence[Tensor], name: str) -> Tensor:
    """Largest `full_amax` of weights that share a scale."""
    return torch.stack([full_amax(w, name) for w in weights]).amax(dim=0)
