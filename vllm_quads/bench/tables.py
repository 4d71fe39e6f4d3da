# SPDX-License-Identifier: Apache-2.0
"""Results as markdown tables: what a benchmark prints, and what the README shows. Reads results only, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_quads.bench.result import Result, Series, ratios

FP8_BLOCK = "FP8 128x128 block"
"""The peer that QUADS is held against."""
NO_RAC = "QUADS 4/6 + centring, no RAC"
QUARTER = "QUADS 4/6 + centring, RAC 25 %"
DEFAULT = "QUADS 4/6 + centring, RAC 100 % (default contract)"
BYTE_FLOOR = "floor: NVFP4 bytes"
Format = Callable[[float], str]


def markdown(result: Result) -> str:
    """The tables of a result, and what they were measured on."""
    special = {"moe": _moe, "quantize": _quantize, "serve": _serve, "logprobs": _logprobs}
    tables = special.get(result.bench, _plain)(result)
    parts = [f"**{result.title}**", *tables, _footer(result)]
    if result.missing:
        parts.append("Not measured: " + "; ".join(f"{name} ({why})" for name, why in result.missing.items()))
    return "\n\n".join(parts)


def rac_cost(result: Result) -> dict[str, dict[int, float]]:
    """What the residual adds to the layer of a `moe` result, in percent, by what is compensated."""
    base = result.get(NO_RAC)
    if base is None:
        return {}
    found = {"RAC 25 %": result.get(QUARTER), "RAC 100 %": result.get(DEFAULT)}
    return {n: {m: (r - 1) * 100 for m, r in ratios(s, base).items()} for n, s in found.items() if s is not None}


def speedups(result: Result) -> dict[str, dict[int, float]]:
    """How many times as fast as each peer the default contract is (1: as fast), by the peer's name."""
    own = result.get(DEFAULT)
    return {} if own is None else {p.name: ratios(p, own) for p in result.of_role("peer")}


def _moe(result: Result) -> list[str]:
    xs = result.xs()
    times = [s for role in ("quads", "peer", "floor") for s in result.of_role(role)]
    rows: list[tuple[str, Mapping[int, float], Format]] = [(s.name, s.values, _us) for s in times]
    for name, values in speedups(result).items():
        rows.append((f"{name} / default contract", values, _ratio))
    floor, own = result.get(BYTE_FLOOR), result.get(DEFAULT)
    if floor is not None and own is not None:
        rows.append(("NVFP4 byte floor / default contract", ratios(floor, own), _percent))
    for name, values in rac_cost(result).items():
        rows.append((f"cost of {name}", values, lambda v: f"{v:+.1f} %"))
    tables = ["µs a layer:", _table("tokens", xs, rows)]
    checks = result.of_role("check")
    if checks:
        some = sorted({x for s in checks for x in s.values})
        tables.append(_table("tokens", some, [(s.name, s.values, lambda v: f"{v:.2e}") for s in checks]))
    return tables


def _quantize(result: Result) -> list[str]:
    xs = result.xs()
    rows = [(s.name, s.values, _us) for role in ("quads", "floor") for s in result.of_role(role)]
    shares = [(s.name, s.values, _percent) for s in result.of_role("check")]
    return ["µs a call:", _table("rows", xs, [*rows, *shares])]


def _serve(result: Result) -> list[str]:
    xs = result.xs()
    base = result.get(str(result.settings.get("baseline", "")))

    def cells(s: Series) -> list[str]:
        quotient = ratios(s, base) if base is not None and s is not base else {}
        own = [f"{s.values[x]:.0f}" if x in s.values else "–" for x in xs]
        return [f"{v} ({quotient[x]:.2f}×)" if x in quotient else v for x, v in zip(xs, own, strict=True)]

    lines = ["| sequences | " + " | ".join(map(str, xs)) + " |", "|---" * (len(xs) + 1) + "|"]
    lines += [f"| {s.name} | " + " | ".join(cells(s)) + " |" for s in result.series]
    hit = result.settings.get("experts_hit")
    if hit:
        lines.append(
            "| experts of a layer that a decode step uses | " + " | ".join(str(hit.get(str(x), "–")) for x in xs) + " |"
        )
    tables = ["Output tokens/s:", "\n".join(lines)]
    memory = [
        f"| {name} | {d.get('weights_gib', '–')} | {d.get('kv_left_gib', '–')} | {d.get('kv_left_tokens', '–')} |"
        for name, d in result.details.items()
        if "weights_gib" in d
    ]
    if memory:
        head = "| engine | weights, GiB | left for the KV cache, GiB | tokens |\n|---|---|---|---|"
        tables.append("\n".join([head, *memory]))
    return tables


def _logprobs(result: Result) -> list[str]:
    rows = [f"| {s.name} | " + " | ".join(f"{v:.4f}" for v in s.values.values()) + " |" for s in result.series]
    names = [str(n) for n in result.settings.get("columns", [])]
    return ["\n".join(["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|", *rows])]


def _plain(result: Result) -> list[str]:
    rows = [(f"{s.name}, {s.unit}", s.values, lambda v: f"{v:.4g}") for s in result.series]
    return [_table(result.x, result.xs(), rows)]


def _table(x: str, xs: Sequence[int], rows: Sequence[tuple[str, Mapping[int, float], Format]]) -> str:
    lines = [f"| {x} | " + " | ".join(map(str, xs)) + " |", "|---" * (len(xs) + 1) + "|"]
    for name, values, show in rows:
        lines.append(f"| {name} | " + " | ".join(show(values[x]) if x in values else "–" for x in xs) + " |")
    return "\n".join(lines)


def _footer(result: Result) -> str:
    e = result.environment
    facts = [f"{name}: {value:.3g}" for name, value in result.facts.items()]
    named = [f"{n} {e[n]}" for n in ("driver", "vllm-quads", "torch", "triton", "vllm", "source", "commit") if n in e]
    where = [e.get("date", ""), e.get("card", ""), *named]
    return ", ".join(where) + (f"; {'; '.join(facts)}" if facts else "")


def _us(v: float) -> str:
    return f"{v:.1f}" if v < 100 else f"{v:.0f}"


def _ratio(v: float) -> str:
    return f"{v:.2f}×"


def _percent(v: float) -> str:
    return f"{v:.0%}"
