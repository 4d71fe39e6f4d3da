# SPDX-License-Identifier: Apache-2.0
"""A picture of the mismatch: how large gaps are, at which probabilities, and where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer_qat.mismatch import log_ratio, measure
from trainer_qat.probe import LayerProbe
from vllm_quads.nvfp4 import QuadsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 20_000
_BLUE, _GREY, _RED = "#4f46e5", "#94a3b8", "#dc2626"


def plot_mismatch(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor | None = None,
    *,
    probe: LayerProbe | None = None,
    path: Path | str | None = None,
    title: str = "Trainer - rollout mismatch",
) -> Figure:
    """Histogram of |log-prob gap|, scatter of probabilities and, with a probe, bars per decoder layer.

    Args:
        trainer, rollout, mask: log-probs of sampled tokens, as in `trainer_qat.mismatch`.
        probe: result of `probe_layers`; None leaves the third panel out.
        path: where to save the picture (the suffix says which format); None does not save it.

    Returns:
        The figure, for a tracker (`wandb.Image(figure)`, `SummaryWriter.add_figure`).

    Raises QuadsError if no token counts.
    """
    from matplotlib.figure import Figure

    report = measure(trainer, rollout, mask)
    if not report.tokens:
        raise QuadsError("plot_mismatch: the mask leaves no token to plot")
    counted = torch.ones_like(trainer, dtype=torch.bool) if mask is None else mask.bool()
    gap = log_ratio(trainer, rollout, mask)[counted.to(trainer.device)].abs().cpu()
    probabilities = [x.detach()[counted.to(x.device)].double().exp().cpu() for x in (rollout, trainer)]

    panels = 2 if probe is None else 3
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels)
    _histogram(axes[0], gap[gap.isfinite()])
    _scatter(axes[1], *probabilities)
    if probe is not None:
        _layers(axes[2], probe)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    numbers = f"mean {report.mean_gap:.4f}, p99 {report.p99_gap:.3f}, max {report.max_gap:.3f}, k3 {report.k3:.2e}"
    figure.suptitle(f"{title}: {report.tokens} tokens, |gap| {numbers}", fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _histogram(axis: Axes, gap: Tensor) -> None:
    axis.hist(gap.numpy(), bins=60, color=_BLUE)
    axis.set_yscale("log")
    axis.set_xlabel("|log-prob gap|, nats")
    axis.set_ylabel("tokens")
    axis.set_title("Gaps")


def _scatter(axis: Axes, rollout: Tensor, trainer: Tensor) -> None:
    step = max(1, rollout.numel() // _POINTS)
    axis.plot([0, 1], [0, 1], color=_RED, linewidth=0.8)
    axis.scatter(rollout[::step].numpy(), trainer[::step].numpy(), s=3, alpha=0.4, color=_BLUE, linewidths=0)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.set_aspect("equal")
    axis.set_xlabel("probability in the rollout")
    axis.set_ylabel("probability in the trainer")
    axis.set_title("Sampled tokens")


def _layers(axis: Axes, probe: LayerProbe) -> None:
    from matplotlib.ticker import MaxNLocator

    layers = [row.layer for row in probe.rows]
    axis.bar(layers, [row.accumulated for row in probe.rows], color=_GREY, label="accumulated")
    axis.bar(layers, [row.isolated for row in probe.rows], color=_BLUE, width=0.5, label="of this layer alone")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("decoder layer")
    axis.set_ylabel("relative error of hidden states")
    axis.set_title("Where it enters")
    axis.legend(fontsize=8, frameon=False)
