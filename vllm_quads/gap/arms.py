# SPDX-License-Identifier: Apache-2.0
"""The arms of the gap experiment: rollout variants, each a contract, and trainer variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_quads.nvfp4 import Contract

TRAINERS = ("BF16", "QAT")
"""QAT is the W4A16 path: the trainer multiplies with the rollout's own quantized weights."""


@dataclass(frozen=True)
class RolloutArm:
    """One rollout variant. A contract of None is the unquantized BF16 engine."""

    name: str
    contract: Contract | None
    needs_calibration: bool = False


def _arm(name: str, form: str = "none", ratio: float = 0.0, *, free: bool = False, **activation: str) -> RolloutArm:
    levers = {"block_scale_rule": "max_to_six", "centering": "none"}
    if free:
        levers = {"block_scale_rule": "four_over_six", "centering": "median"}
    options: dict[str, Any] = {
        "activation": levers | activation,
        "compensation": {"form": form, "ratio": ratio, "allocation": "budget"},
    }
    calibrated = ratio > 0 or options["activation"]["centering"] != "none"
    return RolloutArm(name, Contract().merged(options), calibrated)


BF16 = RolloutArm("BF16", None)
W4A16 = RolloutArm("W4A16", Contract().merged({"scheme": "w4a16"}))
W4A4 = _arm("W4A4")
CENTERING = _arm("W4A4 + centring", centering="median")
FOUR_OVER_SIX = _arm("W4A4 + four-over-six", block_scale_rule="four_over_six")
FREE = _arm("W4A4 + centring + 4/6", free=True)
RAC_10 = _arm("RAC 10 %", "blocks", 0.10)
RAC_25 = _arm("RAC 25 %", "blocks", 0.25)
RAC_50 = _arm("RAC 50 %", "blocks", 0.50)
RAC_10_FREE = _arm("RAC 10 % + centring + 4/6", "blocks", 0.10, free=True)
RAC_25_FREE = _arm("RAC 25 % + centring + 4/6", "blocks", 0.25, free=True)
RAC_50_FREE = _arm("RAC 50 % + centring + 4/6", "blocks", 0.50, free=True)
ROWS_DECODE = _arm("RAC rows, decode only", "auto")
ROWS = _arm("RAC rows (100 %)", "rows")
DEFAULT = RolloutArm("default contract", Contract(), True)

QUICK = (
    BF16,
    W4A16,
    W4A4,
    CENTERING,
    FOUR_OVER_SIX,
    RAC_10_FREE,
    RAC_25_FREE,
    RAC_50_FREE,
    ROWS_DECODE,
    ROWS,
)
"""The arms that the test suite holds to their promises."""
FULL = (
    BF16,
    W4A16,
    W4A4,
    CENTERING,
    FOUR_OVER_SIX,
    FREE,
    RAC_10,
    RAC_25,
    RAC_50,
    RAC_10_FREE,
    RAC_25_FREE,
    RAC_50_FREE,
    ROWS_DECODE,
    ROWS,
    DEFAULT,
)
