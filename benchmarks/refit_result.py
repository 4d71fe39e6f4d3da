# SPDX-License-Identifier: Apache-2.0
"""One result, table and plot out of the lines of `benchmarks/refit.py quads`, `bf16` and `fp8`.

python -m benchmarks.refit_result DIRECTORY [--out DIRECTORY]     # reads refit-*.jsonl, runs on one machine
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_quads.bench.plot import plot
from vllm_quads.bench.result import Result, Series
from vllm_quads.bench.tables import markdown

PUSHES = {
    (True, "none"): "push() packed",
    (False, "none"): "push() BF16",
    (True, "host"): 'push() packed, rollback="host" (default)',
}
INSTALLS = {True: "packed experts: install", False: "BF16 experts: quantize and install"}
PEERS = {"bf16": "vLLM reload, BF16 engine", "fp8": "vLLM reload, FP8 engine (online)"}


def lines(path: Path) -> list[dict[str, Any]]:
    """The events of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def event(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The first event of that name; empty if there is none."""
    return next((e for e in events if e["event"] == name), {})


def column(events: list[dict[str, Any]], name: str, key: str, **where: Any) -> dict[int, float]:
    """Repeat -> value, of the events for which all of `where` is true."""
    chosen = [e for e in events if e["event"] == name and all(e.get(k) == v for k, v in where.items())]
    return {e["repeat"] + 1: e[key] for e in chosen if key in e}


def result_of(directory: Path) -> Result:
    """The runs of one machine, in seconds."""
    own = lines(directory / "refit-quads.jsonl")
    floor = event(own, "floor")
    series, facts, missing = [], {"copy bandwidth, GB/s": floor["copy_gbs"]}, {}
    for (packed, rollback), name in PUSHES.items():
        values = column(own, "push", "push", packed=packed, rollback=rollback, verified=True)
        series.append(Series(name, "quads", "s", values))
    unverified = column(own, "push", "push", packed=True, rollback="none", verified=False)
    series.append(Series("push() packed, verify=False", "quads", "s", unverified))
    for packed, name in INSTALLS.items():
        values = column(own, "install", "experts", packed=packed)
        series.append(Series(name, "quads", "s", values))
        copy = floor["packed" if packed else "bf16"]
        series.append(Series(f"{name} / copy", "check", "x", {x: v / copy for x, v in values.items()}))
        series.append(Series(f"copy of those {'packed' if packed else 'BF16'} bytes", "floor", "s", {1: copy}))
    for kind, name in PEERS.items():
        events = lines(directory / f"refit-{kind}.jsonl")
        failed = next((e["error"] for e in events if "error" in e), None if events else "was not run")
        if failed is not None:
            missing[name] = failed
        for stacked, how in ((True, "stacked experts"), (False, "expert by expert")):
            values = column(events, "reload", "seconds", stacked=stacked)
            if values:
                series.append(Series(f"{name}, {how}", "peer", "s", values))
    start = event(own, "start")
    return Result(
        "refit",
        f"Refit of a Qwen3-30B-A3B shape ({start['layers']} layers) under CUDA graphs, trainer and engine on one GPU",
        "repeat",
        tuple(s for s in series if s.values),
        start["environment"],
        {"name": "qwen3-30b-a3b", "layers": start["layers"]},
        facts,
        details={
            PUSHES[e["packed"], e["rollback"]]: e
            for e in own
            if e["event"] == "push" and e["verified"] and (e["packed"], e["rollback"]) in PUSHES
        },
        missing=missing,
    )


def main() -> None:
    """Store, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=Path("quads-bench"))
    options = parser.parse_args()
    if not event(lines(options.directory / "refit-quads.jsonl"), "floor"):
        parser.error(f"{options.directory} holds no refit-quads.jsonl of a run that has measured anything")
    result = result_of(options.directory)
    path = result.save(options.out / f"{result.stem}.json")
    plot(result, path.with_suffix(".png"))
    print(markdown(result))


if __name__ == "__main__":
    main()
