# SPDX-License-Identifier: Apache-2.0
"""The result of a gap experiment: JSON, a table, and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class GapRow:
    """One trainer x rollout pair, over all generated positions."""

    trainer: str
    rollout: str
    kl: float
    """KL(trainer || rollout) per token, full vocabulary, nats."""
    mean_gap: float
    """Mean |log-prob gap| of tokens sampled from the rollout's distribution."""
    p99_gap: float
    max_gap: float
    k3: float
    """k3 estimate of KL(rollout || trainer) on the same tokens."""
    ess: float
    """Effective sample size of the importance weights, as a share of the tokens."""


@dataclass(frozen=True)
class GapReport:
    """All pairs, and what they were measured on."""

    model: str
    rows: tuple[GapRow, ...]
    tokens: int
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: dict[str, float]
    devices: dict[str, str] = field(default_factory=dict)
    """What `trainer` and `rollout` ran on: BF16 is rounded differently on a CPU and on a GPU."""

    def row(self, trainer: str, rollout: str) -> GapRow:
        """The row of one pair."""
        return next(r for r in self.rows if (r.trainer, r.rollout) == (trainer, rollout))

    def removed(self, rollout: str) -> float:
        """Share of the activation KL (QAT trainer x W4A4) that a rollout arm removes."""
        return 1.0 - self.row("QAT", rollout).kl / self.row("QAT", "W4A4").kl

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; each row also says which share of the QAT x W4A4 KL it removes."""
        rows = [asdict(r) | ({"removed": self.removed(r.rollout)} if _compares(r) else {}) for r in self.rows]
        return asdict(self) | {"rows": rows}

    def save(self, out: Path) -> tuple[Path, Path]:
        """Write `gap.json` and `gap.png` into a folder; returns both paths."""
        out.mkdir(parents=True, exist_ok=True)
        data, picture = out / "gap.json", out / "gap.png"
        data.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        self.plot(picture)
        return data, picture

    def table(self) -> Table:
        """Table for a terminal."""
        where = "".join(f", {side} on {device}" for side, device in self.devices.items())
        table = Table(title=f"Trainer x rollout gap on {self.model} ({self.tokens} tokens per pair{where})")
        for name in ("trainer", "rollout"):
            table.add_column(name)
        for name in ("KL / token", "removed", "mean |gap|", "p99", "max", "k3", "ESS"):
            table.add_column(name, justify="right")
        previous = None
        for r in self.rows:
            if previous not in (None, r.trainer):
                table.add_section()
            previous = r.trainer
            removed = f"{self.removed(r.rollout):.1%}" if _compares(r) else ""
            numbers = (r.mean_gap, r.p99_gap, r.max_gap, r.k3, r.ess)
            table.add_row(r.trainer, r.rollout, f"{r.kl:.4f}", removed, *(f"{v:.3f}" for v in numbers))
        return table

    def plot(self, path: Path) -> None:
        """Bars of KL per token (log scale), the trainers side by side, the drift control as a line."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        trainers = sorted({r.trainer for r in self.rows})
        rollouts = list(dict.fromkeys(r.rollout for r in self.rows))
        height = 0.8 / len(trainers)
        figure, axis = plt.subplots(figsize=(9, 1.2 + 0.42 * len(rollouts)), layout="constrained")
        for i, (trainer, color) in enumerate(zip(trainers, ("#94a3b8", "#4f46e5"), strict=False)):
            values = [self.row(trainer, rollout).kl for rollout in rollouts]
            positions = [n + (i - (len(trainers) - 1) / 2) * height for n in range(len(rollouts))]
            bars = axis.barh(positions, values, height=height, color=color, label=f"{trainer} trainer")
            axis.bar_label(bars, fmt="%.4f", padding=3, fontsize=8)
        drift = self.row("BF16", "BF16").kl
        axis.axvline(
            drift, color="#dc2626", linestyle="--", linewidth=1, label=f"engine drift (BF16 x BF16): {drift:.4f}"
        )
        axis.set_xscale("log")
        axis.set_xlim(right=axis.get_xlim()[1] * 2)
        axis.set_yticks(range(len(rollouts)), rollouts)
        axis.invert_yaxis()
        axis.set_xlabel("KL(trainer || rollout) per token, nats (log scale)")
        axis.set_title(f"How far the rollout is from the trainer: {self.model}")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _compares(row: GapRow) -> bool:
    """True for rows whose weights agree with the trainer's, so that the share of the activation KL means something."""
    return row.trainer == "QAT" and row.rollout != "BF16"
