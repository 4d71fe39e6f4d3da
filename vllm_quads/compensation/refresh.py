# SPDX-License-Identifier: Apache-2.0
"""From gathered statistics to the next compensation state: what happens at a refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.compensation.policy import uses_blocks
from vllm_quads.compensation.selection import (
    SiteScore,
    column_energy,
    expert_site_score,
    select_budget,
    select_uniform,
    shared_site_score,
)
from vllm_quads.compensation.state import CompensationState, SiteState
from vllm_quads.compensation.statistics import SiteStatistics
from vllm_quads.nvfp4.contract import Allocation, Centering, Contract
from vllm_quads.nvfp4.packed import PackedTensor


@dataclass(frozen=True)
class SiteInputs:
    """What is known of one site at a refit."""

    statistics: SiteStatistics
    weight: PackedTensor
    """Packed weights [E, N, K]; a dense linear is one "expert"."""
    share: Tensor
    """float64 [E]: probability that a token is routed to each expert."""
    per_expert_input: bool
    """True for w2, where every expert has its own input."""
    g: Tensor | None = None
    """Static encode global scale of a shared input, or None for per-token scales."""


def refresh(
    sites: Mapping[str, SiteInputs], contract: Contract, sensitivities: Mapping[str, float] | None = None
) -> CompensationState:
    """Choose centring vectors and blocks for every site.

    With Allocation.BUDGET and no sensitivities at all, every site gets the same ratio (output error alone is a worse
    guide than that). Raises ContractError if sensitivities are given for some sites but not for all.
    """
    centers: dict[str, Tensor] = {}
    scores: dict[str, SiteScore] = {}
    for name, site in sites.items():
        k = site.weight.shape[-1]
        centers[name] = torch.zeros(k, dtype=torch.float32, device=site.statistics.energy.device)
        energy = site.statistics.mean_energy()
        if contract.activation.centering is not Centering.NONE and not site.per_expert_input:
            centers[name] = site.statistics.center(contract.activation.centering)
            energy = site.statistics.mean_energy_centered(centers[name], contract.activation.block_scale_rule, site.g)
        score = expert_site_score if site.per_expert_input else shared_site_score
        scores[name] = score(energy, column_energy(site.weight), site.weight.shape[-2], site.share)
    ratio = contract.compensation.ratio if uses_blocks(contract) else 0.0
    if contract.compensation.allocation is Allocation.BUDGET and sensitivities:
        chosen = select_budget(scores, sensitivities, ratio)
    else:
        chosen = select_uniform(scores, ratio)
    states = {name: SiteState(centers[name], chosen[name]) for name in sites}
    return CompensationState(states, dict(sensitivities or {}))
