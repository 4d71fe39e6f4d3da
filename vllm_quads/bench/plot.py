# SPDX-License-Identifier: Apache-2.0
"""Plots of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_quads.bench.result import Result, Series, ratios
from vllm_quads.bench.tables import DEFAULT, FP8_BLOCK

_OURS = ("#4f46e5", "#818cf8", "#0ea5e9", "#7c3aed", "#14b8a6", "#db2777")
_PEERS = ("#64748b", "#f59e0b", "#dc2626", "#16a34a", "#a16207")
_FLOORS = ("#475569", "#f87171", "#a8a29e")


def plot(result: Result, path: Path) -> Path:
    """Write a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    special = {
        "moe": _moe,
        "quantize": _quantize,
        "serve": _serve,
        "logprobs": _bars,
        "training": _training,
        "refit": _refit,
    }
    figure = special.get(result.bench, _lines)(result, plt)
    e = result.environment
    versions = ", ".join(f"{n} {e[n]}" for n in ("vllm-quads", "torch", "vllm") if n in e)
    figure.suptitle(f"{result.title}\n{e.get('card', '')}, {e.get('date', '')[:10]}, {versions}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _moe(result: Result, plt: Any) -> Any:
    """Microseconds a layer over tokens with the floors; below, the time of each kernel relative to FP8 block."""
    figure, (times, relative) = plt.subplots(
        2, 1, figsize=(9, 9), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    base = result.get(FP8_BLOCK)
    for s, style in _styled(result):
        _line(times, s, style)
        if base is not None and s.role != "floor":
            _line(relative, Series(s.name, s.role, "", ratios(base, s)), style)
    _log_x(times, result.xs())
    times.set_yscale("log")
    bounds = [v for s in result.series if s.role in ("quads", "peer") or "bytes" in s.name for v in s.values.values()]
    times.set_ylim(bottom=0.7 * min(bounds, default=1.0))  # the FLOP floor of few tokens would flatten the rest
    times.set_ylabel("µs per layer")
    figure.legend(*times.get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    _log_x(relative, result.xs())
    relative.set_ylabel("speed relative to FP8 block" if base is not None else "(FP8 block was not measured)")
    relative.set_xlabel("tokens")
    relative.axhline(1.0, color="#dc2626", linewidth=0.8)
    _tidy(times, relative)
    return figure


def _quantize(result: Result, plt: Any) -> Any:
    """Microseconds a call over rows; below, the share of the copy bandwidth."""
    figure, (times, share) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    for s, style in _styled(result):
        _line(times, s, style)
        values = result.get(f"share of copy bandwidth: {s.name}")
        if values is not None:
            _line(share, values, style)
    _log_x(times, result.xs())
    times.set_yscale("log")
    times.set_ylabel("µs per call")
    times.legend(fontsize=7)
    _log_x(share, result.xs())
    share.set_ylabel("share of copy bandwidth")
    share.set_xlabel("rows")
    share.set_ylim(bottom=0)
    _tidy(times, share)
    return figure


def _serve(result: Result, plt: Any) -> Any:
    """Output tokens/s over sequences; beside it, relative to the baseline."""
    figure, (speed, relative) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    base = result.get(str(result.settings.get("baseline", "")))
    for s, style in _styled(result):
        _line(speed, s, style)
        if base is not None:
            _line(relative, Series(s.name, s.role, "", ratios(s, base)), style)
    for axis in (speed, relative):
        _log_x(axis, result.xs())
        axis.set_xlabel("sequences")
    speed.set_yscale("log")
    speed.set_ylabel("output tokens/s")
    speed.legend(fontsize=7)
    relative.set_ylabel("relative to FP8 block" if base is not None else "(FP8 block was not measured)")
    relative.axhline(1.0, color="#dc2626", linewidth=0.8)
    _tidy(speed, relative)
    return figure


def _lines(result: Result, plt: Any) -> Any:
    """Every series that is not a check over x."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for s, style in _styled(result):
        _line(axis, s, style)
    _log_x(axis, result.xs())
    axis.set_yscale("log")
    axis.set_xlabel(result.x)
    axis.set_ylabel(next((s.unit for s in result.series), ""))
    axis.legend(fontsize=7)
    _tidy(axis)
    return figure


def _bars(result: Result, plt: Any) -> Any:
    """The first column of each series as a bar."""
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.5 * len(result.series)), layout="constrained")
    values = [next(iter(s.values.values())) for s in result.series]
    colors = [_OURS[0] if s.role == "quads" else _PEERS[0] for s in result.series]
    bars = axis.barh([s.name for s in result.series], values, color=colors)
    axis.bar_label(bars, fmt="%.4f", padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(str((result.settings.get("columns") or [""])[0]))
    _tidy(axis)
    return figure


def _training(result: Result, plt: Any) -> Any:
    """Bars of the first column: a step's time over the baseline's, and peak memory above it."""
    arms = [s for s in result.series if s.role in ("quads", "peer")]
    panels = {"step time / BF16": "step time / BF16 step", "peak above BF16 / BF16 bytes": "extra peak / BF16 bytes"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.5 + 0.4 * len(arms)), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        checks = [result.get(f"{s.name}: {key}") for s in arms]
        values = [next(iter(c.values.values())) if c is not None else float("nan") for c in checks]
        colors = [_OURS[0] if s.role == "quads" else _PEERS[0] for s in arms]
        bars = axis.barh([s.name for s in arms], values, color=colors)
        axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
        axis.margins(x=0.15)
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    axes[0].axvline(1.0, color="#dc2626", linewidth=0.8)
    _tidy(*axes)
    return figure


def _refit(result: Result, plt: Any) -> Any:
    """Seconds of the last repeat as bars on a logarithmic axis."""
    bars = [s for s in result.series if s.role != "check"]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.4 * len(bars)), layout="constrained")
    colors = {"quads": _OURS[0], "peer": _PEERS[0], "floor": _FLOORS[2]}
    drawn = axis.barh(
        [s.name for s in bars], [s.values[max(s.values)] for s in bars], color=[colors[s.role] for s in bars]
    )
    axis.bar_label(drawn, fmt="%.3g s", padding=3, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.set_xlabel("seconds (last repeat)")
    _tidy(axis)
    return figure


def _styled(result: Result) -> list[tuple[Series, dict[str, Any]]]:
    colors = {"quads": _OURS, "peer": _PEERS, "floor": _FLOORS}
    styled = []
    for role, palette in colors.items():
        for i, s in enumerate(result.of_role(role)):
            style: dict[str, Any] = {"color": palette[i % len(palette)]}
            if role == "floor":
                style |= {"linestyle": "--", "linewidth": 1}
            else:
                style |= {"marker": "o", "markersize": 3.5, "linewidth": 2.2 if s.name == DEFAULT else 1.3}
            styled.append((s, style))
    return styled


def _line(axis: Any, s: Series, style: dict[str, Any]) -> None:
    xs = sorted(s.values)
    axis.plot(xs, [s.values[x] for x in xs], label=s.name, **style)


def _log_x(axis: Any, xs: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(xs, [str(x) for x in xs])
    axis.minorticks_off()


def _tidy(*axes: Any) -> None:
    for axis in axes:
        axis.grid(True, linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
