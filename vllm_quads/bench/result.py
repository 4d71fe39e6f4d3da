# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found: one schema for all of them, and its JSON form."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_quads.nvfp4.errors import QuadsError

SCHEMA = 1
BENCHES = ("moe", "quantize", "weights", "training", "serve", "logprobs", "refit")
ROLES = ("quads", "peer", "floor", "check")
"""`quads`: ours; `peer`: somebody else's; `floor`: a bound; `check`: a number that is no time (an error, a share)."""


@dataclass(frozen=True)
class Series:
    """One line of the table: a value for each x."""

    name: str
    role: str
    unit: str
    values: dict[int, float]
    note: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise QuadsError(f"series {self.name!r}: role is {self.role!r}, expected one of {', '.join(ROLES)}")
        _require_types(self, str, "name", "unit", "note")


@dataclass(frozen=True)
class Result:
    """One run of one benchmark."""

    bench: str
    title: str
    x: str
    """What the keys of `Series.values` count."""
    series: tuple[Series, ...]
    environment: dict[str, str]
    """Date, card, driver, versions, commit and command line; see `environment.describe`."""
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers of the card, measured in the same run (copy bandwidth, matrix multiplication)."""
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    """More about a series, by its name (memory of an engine, every single run)."""
    missing: dict[str, str] = field(default_factory=dict)
    """What was asked for and not measured, and why."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.bench not in BENCHES:
            raise QuadsError(f"bench is {self.bench!r}, expected one of {', '.join(BENCHES)}")
        _require_types(self, str, "title", "x")
        _require_types(self, dict, "environment", "settings", "facts", "details", "missing")
        for field_name, kind in (("environment", str), ("facts", (int, float)), ("details", dict), ("missing", str)):
            for key, value in getattr(self, field_name).items():
                if not isinstance(value, kind):
                    raise QuadsError(f"result is damaged ({field_name}[{key!r}] is {value!r}); measure again")

    def get(self, name: str) -> Series | None:
        """The series of that name, if it was measured."""
        return next((s for s in self.series if s.name == name), None)

    def of_role(self, role: str) -> list[Series]:
        """All series of a role, in order."""
        return [s for s in self.series if s.role == role]

    def xs(self) -> list[int]:
        """Every x that a series has a value for, ascending."""
        return sorted({x for s in self.series for x in s.values})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; keys of `values` become strings, as JSON wants them."""
        data = asdict(self)
        for s in data["series"]:
            s["values"] = {str(x): _rounded(v) for x, v in s["values"].items()}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Inverse of `to_dict`. Raises QuadsError for another schema."""
        if data.get("schema") != SCHEMA:
            raise QuadsError(f"result has schema {data.get('schema')!r}, expected {SCHEMA}; measure again")
        try:
            fields = dict(data)
            fields["series"] = tuple(
                Series(**{**s, "values": {int(x): float(v) for x, v in s["values"].items()}}) for s in data["series"]
            )
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise QuadsError(f"result is damaged ({type(e).__name__}: {e}); measure again") from e

    def save(self, path: Path) -> Path:
        """Write JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read JSON. Raises QuadsError if it is no result."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise QuadsError(f"{path}: is not JSON ({e})") from e
        if not isinstance(data, dict):
            raise QuadsError(f"{path}: is not the result of a benchmark")
        try:
            return cls.from_dict(data)
        except QuadsError as e:
            raise QuadsError(f"{path}: {e}") from e

    @property
    def stem(self) -> str:
        """File name without suffix: date, card, benchmark and subject."""
        card = self.environment.get("card", "unknown").replace("NVIDIA", "").strip()
        parts = (self.environment.get("date", "")[:10], card, self.bench, str(self.settings.get("name", "")))
        return "-".join("".join(c if c.isalnum() else "-" for c in p.lower()).strip("-") for p in parts if p)


def _require_types(record: Any, kind: type, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, kind):
            raise QuadsError(f"result is damaged ({name} is {value!r}, expected {kind.__name__}); measure again")


def ratios(of: Series, to: Series) -> dict[int, float]:
    """`of` divided by `to` where both have a value: how many times as long (or as much)."""
    return {x: of.values[x] / to.values[x] for x in of.values if x in to.values}


def _rounded(value: float) -> float:
    """Six significant digits: more is noise, and makes files hard to compare."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
