# SPDX-License-Identifier: Apache-2.0
"""What a refit did, and how an engine stands: plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from vllm_quads.refit.manifest import Rollback


@dataclass(frozen=True)
class RefitReport:
    """What a committed refit did."""

    policy_version: int
    fingerprint: str
    """Fingerprint of the quantized weights that serve, over all ranks."""
    tensors: int
    """Tensors received."""
    bytes: int
    """Bytes received."""
    seconds: Mapping[str, float]
    """Seconds per phase: `validate`, `transfer` (waiting for tensors, and moving them), `quantize`, `undo` (keeping the
    previous bytes), `install` (digests of what is written included), `derive` (operands recomputed from weights and
    compensation state), `verify` (digests of what is not quantized, and reading all digests); of the slowest rank. On a
    GPU `transfer` also holds time of the host, while the device is at another phase. For an engine in other processes
    the `client_...` are the trainer's clock around these phases, which they contain. A trainer adds its own under
    `trainer_...`; `trainer_total` is the whole push by the clock, `client_total` the whole load of a checkpoint."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Digest of each unit (see `nvfp4.fingerprint`), over all ranks."""
    payload: str = "packed"
    """`packed`, `bf16`, or `mixed`."""
    rollback: Rollback = Rollback.HOST
    verified: bool = True
    """True if every tensor was compared with the trainer's, by digests: also those that are not quantized."""
    fingerprint_verified: bool = True
    """True if the quantized weights were: by digests, or by a fingerprint (all that a checkpoint directory has)."""

    @property
    def total_seconds(self) -> float:
        """Of the whole push by the trainer's clock, if it told; else the sum of the engine's phases."""
        total = self.seconds.get("trainer_total") or self.seconds.get("client_total")
        return total or sum(s for phase, s in self.seconds.items() if not phase.startswith(("trainer_", "client_")))

    def __str__(self) -> str:
        parts = ((p, s) for p, s in self.seconds.items() if s >= 1e-3 and not p.endswith("_total"))
        phases = ", ".join(f"{phase} {s:.3g} s" for phase, s in parts)
        checked = "not compared with the trainer"
        if self.fingerprint_verified:
            checked = "verified" if self.verified else "verified for the quantized weights alone"
        return (
            f"policy version {self.policy_version}: {self.tensors} tensors, {self.bytes / 1e9:.3g} GB ({self.payload}) "
            f"in {self.total_seconds:.3g} s ({phases}); fingerprint {self.fingerprint}, {checked}"
        )

    def with_seconds(self, **seconds: float) -> RefitReport:
        """The report with further phases."""
        return replace(self, seconds={**self.seconds, **seconds})

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return {**asdict(self), "rollback": self.rollback.value}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RefitReport:
        """Inverse of `to_json`."""
        return RefitReport(**{**data, "rollback": Rollback(data["rollback"])})


KEEP_SERVING = "the previous weights keep serving"
STILL_REFUSES = "the engine still refuses"
REFUSES = "the previous weights are gone, and the engine refuses to serve until a complete refit succeeds"


def without_outcome(message: str) -> str:
    """A message without what it says of what one rank serves."""
    return message.replace(f"; {KEEP_SERVING}", "").replace(f"; {REFUSES}", "")


def says_what_serves(message: str) -> bool:
    """True for the message of a failed refit that already ends with its outcome."""
    return any(outcome in message for outcome in (KEEP_SERVING, STILL_REFUSES, REFUSES))


class EngineState(str, Enum):
    """Whether an engine may answer."""

    SERVING = "serving"
    REFITTING = "refitting"
    """Some layers hold new weights, some old ones: no forward pass runs."""
    REFUSING = "refusing"
    """A refit failed and the previous weights are gone: no forward pass runs until a complete refit succeeds."""


@dataclass
class RefitCounters:
    """How often refits ended how, since the engine started."""

    committed: int = 0
    refused: int = 0
    """At `begin`: nothing had been sent."""
    rolled_back: int = 0
    """Failed or aborted later; the previous weights served on."""
    broken: int = 0
    """Failed and left the engine refusing."""


@dataclass(frozen=True)
class RefitStatus:
    """How an engine stands."""

    state: EngineState
    reason: str
    """Why it does not serve; empty if it does."""
    policy_version: int
    counters: RefitCounters
    report: RefitReport | None
    """Of the last committed refit."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        report = None if self.report is None else self.report.to_json()
        return {
            "state": self.state.value,
            "reason": self.reason,
            "policy_version": self.policy_version,
            "counters": asdict(self.counters),
            "report": report,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RefitStatus:
        """Inverse of `to_json`."""
        report = data["report"]
        return RefitStatus(
            EngineState(data["state"]),
            data["reason"],
            data["policy_version"],
            RefitCounters(**data["counters"]),
            None if report is None else RefitReport.from_json(report),
        )
