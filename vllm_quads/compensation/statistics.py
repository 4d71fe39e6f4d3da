# SPDX-License-Identifier: Apache-2.0
"""Error statistics of a site, gathered on the device while the engine generates.

Two accumulators: the residual's energy per channel, and a ring of recent input rows, from which a centring vector (the
median needs samples) and the error that is left under it are computed at a refit. All tensors have fixed shapes and
addresses, and `update` has no host synchronisation, so it can run inside a captured CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.nvfp4.contract import Centering
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.reference import BlockScaleRule, quantize_activation

RING_ROWS = 512
"""Input rows kept per shared site."""


class SiteStatistics:
    """Accumulators of one site with K channels and G groups (experts for w2, else 1)."""

    def __init__(self, k: int, groups: int = 1, *, ring_rows: int = 0, device: torch.device | str = "cpu") -> None:
        """ring_rows > 0 keeps a ring, which only a site with one group can have (FormatError)."""
        if ring_rows and groups != 1:
            raise FormatError(
                f"ring_rows: is {ring_rows} for a site of {groups} groups; only a shared input has a ring"
            )
        self.energy = torch.zeros(groups, k, dtype=torch.float64, device=device)
        """Sum over tokens of the squared residual, [G, K]."""
        self.tokens = torch.zeros(groups, dtype=torch.int64, device=device)
        """Tokens (rows) seen by each group, [G]."""
        # One row more than the ring: rows that do not count go there, because a captured graph cannot skip them.
        self._rows = torch.zeros(ring_rows + 1, k, dtype=torch.bfloat16, device=device)
        self.written = torch.zeros((), dtype=torch.int64, device=device)
        """Rows that were ever put into the ring."""
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        """Scratch of the kernel that gathers on Hopper; zero between launches."""
        self.paused = torch.zeros(1, dtype=torch.int32, device=device)
        """Where this is not zero that kernel gathers nothing: the switch of what captured CUDA graphs replay."""
        self.ring = self._rows[:ring_rows]
        """The most recent input rows, before centring, [R, K]."""

    def update(self, x: Tensor, residual: Tensor, group: Tensor | None = None) -> None:
        """Add input rows x [M, K] and their residual x - Q(x) (float32 [M, K]); group: int64 [M], None means all 0.

        Rows whose squares are not finite (padding of a captured graph may hold anything) are not counted. Sums are
        float32 within a step and float64 over steps.
        """
        squared = residual.square()
        finite = torch.isfinite(squared).all(dim=-1)
        squared = torch.where(finite[:, None], squared, 0.0)
        if group is None:
            self.energy[0].add_(squared.sum(dim=0))
            self.tokens[0].add_(finite.sum())
        else:
            step = torch.zeros(self.energy.shape, dtype=torch.float32, device=x.device)
            self.energy.add_(step.index_add_(0, group, squared))
            self.tokens.index_add_(0, group, finite.to(torch.int64))
        size = self.ring.shape[0]
        if size:
            rows, counts = x[-size:].to(torch.bfloat16), finite[-size:]
            counts = counts & torch.isfinite(rows).all(dim=-1)
            nth = counts.cumsum(0)
            slot = torch.where(counts, (self.written + nth - 1) % size, size)
            self._rows.index_copy_(0, slot, rows)
            self.written.add_(counts.sum())

    def rows(self) -> Tensor:
        """The rows of the ring that were filled, bfloat16 [R, K]."""
        return self.ring[: min(int(self.written), self.ring.shape[0])]

    def center(self, kind: Centering) -> Tensor:
        """Centring vector float32 [K] from the ring; zeros if nothing was seen. Raises FormatError without a ring.

        Of an even number of rows the lower median is taken.
        """
        k = self.ring.shape[1]
        if kind is Centering.NONE:
            return torch.zeros(k, dtype=torch.float32, device=self.ring.device)
        if not self.ring.shape[0]:
            raise FormatError(f"centring {kind.value!r} needs statistics with a ring (ring_rows > 0)")
        rows = self.rows().to(torch.float32)
        if rows.shape[0] == 0:
            return torch.zeros(k, dtype=torch.float32, device=self.ring.device)
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
        main = quantize_activation(x, rule=rule, g=g)
        return (x - main.dequantize()).to(torch.float64).square().mean(dim=0, keepdim=True)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that holds state, by name; their addresses never change."""
        names = ("energy", "tokens", "_rows", "written", "ticket", "paused")
        return {name.strip("_"): getattr(self, name) for name in names}

    def reset(self) -> None:
        """Forget everything, in place (but not whether kernels are paused)."""
        for tensor in (self.energy, self.tokens, self._rows, self.written, self.ticket):
            tensor.zero_()
