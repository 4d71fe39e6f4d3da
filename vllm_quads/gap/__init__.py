# SPDX-License-Identifier: Apache-2.0
"""The gap experiment: how far the rollout's policy is from the trainer's, arm by arm, on the same tokens."""

from __future__ import annotations

from vllm_quads.gap.experiment import GapOptions, Progress, load_prompts, run_gap
from vllm_quads.gap.report import GapReport, GapRow

__all__ = ["GapOptions", "GapReport", "GapRow", "Progress", "load_prompts", "run_gap"]
