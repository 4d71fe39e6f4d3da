# SPDX-License-Identifier: Apache-2.0
"""What a trainer and a rollout engine say to each other during a refit; knows neither of them."""

from __future__ import annotations

from vllm_quads.refit.protocol import (
    Manifest,
    RefitReport,
    RolloutEngine,
    TensorSpec,
    as_engine,
    register_adapter,
)

__all__ = ["Manifest", "RefitReport", "RolloutEngine", "TensorSpec", "as_engine", "register_adapter"]
