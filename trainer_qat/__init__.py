# SPDX-License-Identifier: Apache-2.0
"""Asymmetric QAT for NVFP4 rollouts: weight-only fake quantization through the rollout's own path."""

from __future__ import annotations

from trainer_qat import mismatch
from trainer_qat.cache import CacheMode
from trainer_qat.mismatch import MismatchReport
from trainer_qat.prepare import QatReport, clear_cache, prepare_qat, qat_disabled, remove_qat
from trainer_qat.scoring import score, token_log_probs
from trainer_qat.sensitivity import sensitivities

__all__ = [
    "CacheMode",
    "MismatchReport",
    "QatReport",
    "clear_cache",
    "mismatch",
    "prepare_qat",
    "qat_disabled",
    "remove_qat",
    "score",
    "sensitivities",
    "token_log_probs",
]
