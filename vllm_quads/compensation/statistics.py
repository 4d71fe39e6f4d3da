# SPDX-License-Identifier: Apache-2.0
"""Error statistics of a site, gathered on the device while the engine generates.

Two accumulators: the residual's energy per channel, and a ring of recent input rows, from which a centring vector (the
median needs samples) and the error that is left under it are computed at a refit. All tensors have fixed shapes and
addresses, and `update` has no host synchronisation, so it can run inside a captured CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.compensation.forms import quantize_with_residual
from vllm_quads.nvfp4.contract import Centering
from vllm_quads.nvfp4.reference import BlockScaleRule

RING_ROWS = 512
"""Input rows kept per shared site."""


class SiteStatistics:
    """Accumulators of one site with K channels and G groups (experts for w2, else 1)."""

    def __init__(self, k: int, groups: int = 1, *, ring_rows: int = 0, device: torch.device | str = "cpu") -> None:
        self.energy = torch.zeros(groups, k, dtype=torch.float64, device=device)
        """Sum over tokens of the squared residual, [G, K]."""
        self.tokens = torch.zeros(groups, dtype=torch.int64, device=device)
        """Tokens (rows) seen by each group, [G]."""
        self.ring = torch.zeros(ring_rows, k, dtype=torch.bfloat16, device=device)
        """The most recent input rows, before centring."""

    def update(self, x: Tensor, residual: Tensor, group: Tensor | None = None) -> None:
        """Add input rows x [M, K] and their residual x - Q(x) (float32 [M, K]); group: int64 [M], None means all 0.

        Rows that are not finite (padding of a captured graph may hold anything) are not counted.
        """
        finite = torch.isfinite(residual).all(dim=-1)
        squared = torch.where(finite[:, None], residual, torch.zeros_like(residual)).to(torch.float64).square()
        if group is None:
            group = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        if self.ring.shape[0]:
            rows = x[-self.ring.shape[0] :]
            slot = (self.tokens[0] + torch.arange(rows.shape[0], device=x.device)) % self.ring.shape[0]
            self.ring.index_copy_(0, slot, torch.nan_to_num(rows.to(torch.bfloat16), posinf=0.0, neginf=0.0))
        self.energy.index_add_(0, group, squared)
        self.tokens.index_add_(0, group, finite.to(torch.int64))

    def rows(self) -> Tensor:
        """The rows of the ring that were filled, bfloat16 [R, K]."""
        return self.ring[: min(int(self.tokens[0]), self.ring.shape[0])]

    def center(self, kind: Centering) -> Tensor:
        """Centring vector float32 [K] from the ring."""
        rows = self.rows().to(torch.float32)
        if kind is Centering.NONE or rows.shape[0] == 0:
            return torch.zeros(self.ring.shape[1], device=self.ring.device)
        return rows.mean(dim=0) if kind is Centering.MEAN else rows.median(dim=0).values

    def mean_energy(self) -> Tensor:
        """Mean squared residual per token, float64 [G, K]; zero for groups that saw no token."""
        return self.energy / self.tokens.clamp(min=1)[:, None]

    def mean_energy_centered(self, center: Tensor, rule: BlockScaleRule, g: Tensor | None = None) -> Tensor:
        """Mean squared residual that the ring's rows have with another centring vector, float64 [1, K]."""
        rows = self.rows()
        if rows.shape[0] == 0:
            return self.mean_energy()
        x = rows.to(torch.float32) - center
        main = quantize_with_residual(x, rule=rule, g=g).main
        return (x - main.dequantize()).to(torch.float64).square().mean(dim=0, keepdim=True)

    def reset(self) -> None:
        """Forget everything, in place."""
        for tensor in (self.energy, self.tokens, self.ring):
            tensor.zero_()
