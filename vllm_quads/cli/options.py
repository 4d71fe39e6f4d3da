# SPDX-License-Identifier: Apache-2.0
"""`--option key=value`: contract options on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer

_LISTS = ("targets", "ignore")


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Nested options from `a.b=value` pairs; `targets` and `ignore` are lists separated by commas.

    Values are JSON where they parse as JSON, else strings. Raises a usage error for a pair without `=` and for a key
    given twice; unknown keys and bad values are the contract's to refuse.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--option: {pair!r} is not key=value, for example compensation.ratio=0.5")
        *path, leaf = key.split(".")
        if not all((*path, leaf)):
            raise typer.BadParameter(f"--option: {key!r} is not the name of an option, for example compensation.ratio")
        place = options
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise typer.BadParameter(f"--option: {key}: {part} was given a value before")
        if leaf in place:
            raise typer.BadParameter(f"--option: {key}: is given twice")
        place[leaf] = _value(leaf, value)
    return options


def _value(leaf: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [part.strip() for part in text.split(",") if part.strip()] if leaf in _LISTS else text
