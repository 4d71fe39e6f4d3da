# SPDX-License-Identifier: Apache-2.0
"""What a trainer and a rollout engine say to each other during a refit; knows neither of them."""

from __future__ import annotations

from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit.client import HttpEngine, adapt_url
from vllm_quads.refit.manifest import Manifest, Rollback, TensorSpec
from vllm_quads.refit.protocol import (
    CollectiveEngine,
    CollectiveError,
    Lasting,
    RolloutEngine,
    as_engine,
    register_adapter,
)
from vllm_quads.refit.remote import InFlight
from vllm_quads.refit.report import EngineState, RefitCounters, RefitReport, RefitStatus

register_adapter(adapt_url)

__all__ = [
    "CollectiveEngine",
    "CollectiveError",
    "EngineState",
    "HttpEngine",
    "InFlight",
    "Lasting",
    "Manifest",
    "RefitCounters",
    "RefitError",
    "RefitReport",
    "RefitStatus",
    "Rollback",
    "RolloutEngine",
    "TensorSpec",
    "as_engine",
    "register_adapter",
]
