# SPDX-License-Identifier: Apache-2.0
"""Which 16-channel blocks get their residual compensated.

A block is worth the output error it causes: the energy of its channels' residual times the energy of the weight columns
it is multiplied with. Either every site spends the same ratio of its K, or one budget of MACs is spent over all sites
where output error times the site's sensitivity (mean squared gradient of the log-prob with respect to the site's
output) is largest per MAC. Whole blocks, because the error of an outlier channel sits in its neighbours, and because
their packed codes and scales can be copied as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import ContractError
from vllm_quads.nvfp4.formats import BLOCK_SIZE, blocks
from vllm_quads.nvfp4.packed import PackedTensor


@dataclass(frozen=True)
class SiteScore:
    """What compensating each block of a site buys and costs, per token of the layer."""

    value: Tensor
    """float64 [G, K/16]: squared output error that the block's residual causes."""
    cost: Tensor
    """float64 [G]: MACs that one block adds."""


def column_energy(packed: PackedTensor) -> Tensor:
    """Sum over N of the squared weight, float64 [E, K], for packed weights [E, N, K]; one expert at a time."""
    experts = [
        (PackedTensor(c, s, d).dequantize().to(torch.float64) ** 2).sum(dim=0)
        for c, s, d in zip(packed.codes, packed.block_scales, packed.decode_scale, strict=True)
    ]
    return torch.stack(experts)


def shared_site_score(energy: Tensor, columns: Tensor, n: int, share: Tensor) -> SiteScore:
    """Score of a site whose input all experts share (w13, or a dense linear with one "expert").

    energy: mean squared residual [1, K]; columns: `column_energy` [E, K]; n: output channels; share [E]: probability
    that a token is routed to the expert.
    """
    weighted = energy * (share[:, None] * columns).sum(dim=0, keepdim=True)
    return SiteScore(blocks(weighted).sum(dim=-1), (BLOCK_SIZE * n * share.sum())[None])


def expert_site_score(energy: Tensor, columns: Tensor, n: int, share: Tensor) -> SiteScore:
    """Score of a site with one input per expert (w2); arguments as above with energy [E, K]."""
    weighted = share[:, None] * energy * columns
    return SiteScore(blocks(weighted).sum(dim=-1), BLOCK_SIZE * n * share)


def select_uniform(scores: Mapping[str, SiteScore], ratio: float) -> dict[str, Tensor]:
    """The best `ratio` of the blocks of each group of each site: bool [G, K/16].

    Rounded to the nearest number of blocks, but at least one if ratio > 0. Of equal blocks the first are taken, on
    every device.
    """
    chosen = {}
    for name, score in scores.items():
        total = score.value.shape[-1]
        count = max(1, round(ratio * total)) if ratio > 0 else 0
        best = score.value.argsort(dim=-1, descending=True, stable=True)[..., :count]
        chosen[name] = torch.zeros_like(score.value, dtype=torch.bool).scatter_(-1, best, True)
    return chosen


def select_budget(
    scores: Mapping[str, SiteScore], sensitivities: Mapping[str, float], ratio: float
) -> dict[str, Tensor]:
    """Spend one budget, `ratio` of the MACs of all sites, where sensitivity x output error per MAC is largest.

    Greedy by density, passing over blocks that no longer fit: within one block of the optimum. Raises ContractError
    naming the first site without a sensitivity (output error alone is a worse guide than a uniform ratio), or whose
    sensitivity is not finite and >= 0.
    """
    missing = sorted(set(scores) - set(sensitivities))
    if missing:
        raise ContractError(
            f"{missing[0]}: has no sensitivity, which compensation.allocation='budget' needs; send sensitivities with "
            f"the push, calibrate with gradients, or use compensation.allocation='uniform'"
        )
    for name in sorted(scores):
        if not 0.0 <= sensitivities[name] < math.inf:
            raise ContractError(
                f"{name}: sensitivity is {sensitivities[name]}, expected a finite number >= 0 "
                f"(the mean squared gradient of the log-prob with respect to the site's output)"
            )
    names, density, cost = [], [], []
    for name, score in scores.items():
        per_block = score.cost[:, None].expand_as(score.value)
        # An expert that saw no token costs nothing and gains nothing: never selected.
        gain = torch.where(per_block > 0, sensitivities[name] * score.value / per_block.clamp(min=1e-300), 0.0)
        names.append(name)
        density.append(gain.flatten())
        cost.append(per_block.flatten())
    all_density, all_cost = torch.cat(density), torch.cat(cost)
    mask = torch.zeros_like(all_density, dtype=torch.bool)
    left = ratio * all_cost.sum() * (1 + 1e-9)
    waiting = all_density.argsort(descending=True, stable=True)
    waiting = waiting[all_density[waiting] > 0]
    while waiting.numel():
        spent = all_cost[waiting].cumsum(0)
        fits = int((spent <= left).sum())
        if fits:
            mask[waiting[:fits]] = True
            left = left - spent[fits - 1]
        waiting = waiting[fits:]
        waiting = waiting[all_cost[waiting] <= left]
    parts = mask.split([d.numel() for d in density])
    return {name: part.view_as(scores[name].value) for name, part in zip(names, parts, strict=True)}
