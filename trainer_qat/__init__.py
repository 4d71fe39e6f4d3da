# SPDX-License-Identifier: Apache-2.0
"""Asymmetric QAT for NVFP4 rollouts: weight-only fake quantization through the rollout's own path."""

from __future__ import annotations

from trainer_qat import mismatch
from trainer_qat.cache import CacheMode
from trainer_qat.calibration import calibrate
from trainer_qat.export import ExportReport, export_checkpoint
from trainer_qat.mismatch import MismatchReport
from trainer_qat.plots import plot_mismatch
from trainer_qat.prepare import QatReport, clear_cache, prepare_qat, qat_disabled, remove_qat
from trainer_qat.probe import LayerProbe, probe_layers
from trainer_qat.schedule import Schedule
from trainer_qat.scoring import score, token_log_probs
from trainer_qat.sensitivity import sensitivities
from trainer_qat.steps import follow_optimizer, load_qat_state_dict, qat_state_dict, qat_step
from trainer_qat.sync import RolloutSync

__all__ = [
    "CacheMode",
    "ExportReport",
    "LayerProbe",
    "MismatchReport",
    "QatReport",
    "RolloutSync",
    "Schedule",
    "calibrate",
    "clear_cache",
    "export_checkpoint",
    "follow_optimizer",
    "load_qat_state_dict",
    "mismatch",
    "plot_mismatch",
    "prepare_qat",
    "probe_layers",
    "qat_disabled",
    "qat_state_dict",
    "qat_step",
    "remove_qat",
    "score",
    "sensitivities",
    "token_log_probs",
]
