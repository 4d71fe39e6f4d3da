# SPDX-License-Identifier: Apache-2.0
"""Stored files: which of them are results of a benchmark, and what the others are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_quads.bench.result import Result
from vllm_quads.nvfp4.errors import QuadsError

SUFFIXES = (".json", ".jsonl")


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and the JSON files that lie in a folder. Raises QuadsError for a folder without any."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        if not inside:
            raise QuadsError(f"{path}: holds no {' or '.join(SUFFIXES)} file")
        found += inside
    return found


def load_results(paths: Sequence[Path]) -> tuple[dict[Path, Result], dict[Path, str]]:
    """Results by file, and what each of the other files is.

    Raises QuadsError, naming the file, for one that is no JSON, for a damaged result, and if there is no result at all.
    """
    results: dict[Path, Result] = {}
    others: dict[Path, str] = {}
    for path in paths:
        kind = _kind(path)
        if kind is None:
            results[path] = Result.load(path)
        else:
            others[path] = kind
    if not results:
        listed = "; ".join(f"{path}: {kind}" for path, kind in others.items())
        raise QuadsError(f"no result of `quads bench` to show. {listed}")
    return results, others


def _kind(path: Path) -> str | None:
    """None for a result of `quads bench`, else what the file is."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise QuadsError(f"{path}: is not JSON (no UTF-8 text)") from e
    if path.suffix == ".jsonl":
        return _log_kind(path, text)
    try:
        data = json.loads(text)
    except ValueError as e:
        raise QuadsError(f"{path}: is not JSON ({e})") from e
    if not isinstance(data, dict):
        return f"a JSON {type(data).__name__}"
    if "schema" in data:
        return None
    if {"rows", "tokens", "model"} <= data.keys():
        return "the result of `quads gap`"
    if {"gpu", "layers", "versions"} <= data.keys():
        return "the times of benchmarks/refit_two_gpus.py"
    return f"JSON of another kind, with {_keys(data)}"


def _log_kind(path: Path, text: str) -> str:
    """What a file of JSON lines is."""
    lines = text.splitlines()
    try:
        first = json.loads(lines[0]) if lines else {}
    except ValueError as e:
        raise QuadsError(f"{path}: its first line is not JSON ({e})") from e
    if not isinstance(first, dict):
        return f"{len(lines)} lines of JSON"
    if "event" in first:
        return (
            f"the {len(lines)} events of a run of benchmarks/refit.py; `python -m benchmarks.refit_result DIRECTORY` "
            f"makes a result of a folder with refit-quads.jsonl"
        )
    what = f"; it says of itself: {first['what']}" if isinstance(first.get("what"), str) else ""
    return f"a log of {len(lines)} lines of JSON{what}"


def _keys(data: dict[str, Any]) -> str:
    names = [*map(str, data)][:4]
    return f"the keys {', '.join(names)}{', ...' if len(data) > len(names) else ''}" if names else "no keys"
