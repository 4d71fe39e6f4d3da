# SPDX-License-Identifier: Apache-2.0
"""Synthetic operands for the tests of compensation: outlier channels and offsets, as LLM activations have them."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.compensation import PreparedExperts, SiteState, prepare_experts
from vllm_quads.nvfp4 import PackedTensor


def activations(m: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K]: Gaussian, one channel in 32 thirty times larger, a constant offset per channel, tokens of uneven size."""
    gen = torch.Generator().manual_seed(seed)
    scale = torch.ones(k)
    scale[torch.randperm(k, generator=gen)[: max(1, k // 32)]] = 30.0
    offset = torch.randn(k, generator=gen) * 0.5 * scale
    token = torch.exp(0.5 * torch.randn(m, 1, generator=gen))
    return ((torch.randn(m, k, generator=gen) * scale + offset) * token).to(dtype)


def packed(*shape: int, seed: int = 0) -> PackedTensor:
    """A random packed weight [..., N, K]."""
    return PackedTensor.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1)


def random_site(k: int, groups: int = 1, *, share: float = 0.5, centered: bool = False, seed: int = 0) -> SiteState:
    """A site with about `share` of its blocks selected, and optionally a random centring vector."""
    gen = torch.Generator().manual_seed(seed)
    center = torch.randn(k, generator=gen) * 0.3 if centered else torch.zeros(k)
    return SiteState(center, torch.rand(groups, k // 16, generator=gen) < share)


class Layer:
    """A small random MoE layer whose gate and up have global scales of their own."""

    def __init__(self, experts: int = 6, hidden: int = 64, inter: int = 48, seed: int = 0) -> None:
        self.experts, self.hidden, self.inter = experts, hidden, inter
        self.gate, self.up = packed(experts, inter, hidden, seed=seed), packed(experts, inter, hidden, seed=seed + 1)
        self.down = packed(experts, hidden, inter, seed=seed + 2)
        self.w13 = (
            torch.cat((self.gate.codes, self.up.codes), dim=1),
            torch.cat((self.gate.block_scales.view(torch.uint8), self.up.block_scales.view(torch.uint8)), dim=1).view(
                torch.float8_e4m3fn
            ),
            torch.stack((self.gate.decode_scale, 2.0 * self.up.decode_scale), dim=1),
        )
        self.w2 = (self.down.codes, self.down.block_scales, self.down.decode_scale)

    def dense(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantized gate, up and down of one expert, float64."""
        gate, up, down = (p.dequantize().to(torch.float64)[expert] for p in (self.gate, self.up, self.down))
        return gate, 2.0 * up, down

    def prepare(self, w13_site: SiteState | None = None, w2_site: SiteState | None = None) -> PreparedExperts:
        return prepare_experts(self.w13, self.w2, w13_site, w2_site)


def routing(m: int, experts: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Router weights float32 [M, k] and distinct expert ids int32 [M, k]."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(m, experts, generator=gen)
    weights, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return weights, ids.to(torch.int32)
