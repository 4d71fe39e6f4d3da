# SPDX-License-Identifier: Apache-2.0
"""Residual activation compensation: forms, statistics, selection, state, and the reference forwards.

Torch only. The plugin and the trainer's calibration build on it; kernels are checked against it.
"""

from __future__ import annotations

from vllm_quads.compensation.experts import PreparedExperts, experts_forward, prepare_experts
from vllm_quads.compensation.forms import Compensated, merged, quantize_with_residual
from vllm_quads.compensation.linear import PreparedMatrix, linear_forward, prepare_matrix
from vllm_quads.compensation.policy import TokenForms, token_forms, uses_blocks
from vllm_quads.compensation.refresh import SiteInputs, refresh
from vllm_quads.compensation.selection import SiteScore, column_energy, select_budget, select_uniform
from vllm_quads.compensation.state import STATE_FILE, CompensationState, SiteState
from vllm_quads.compensation.statistics import SiteStatistics

__all__ = [
    "STATE_FILE",
    "Compensated",
    "CompensationState",
    "PreparedExperts",
    "PreparedMatrix",
    "SiteInputs",
    "SiteScore",
    "SiteState",
    "SiteStatistics",
    "TokenForms",
    "column_energy",
    "experts_forward",
    "linear_forward",
    "merged",
    "prepare_experts",
    "prepare_matrix",
    "quantize_with_residual",
    "refresh",
    "select_budget",
    "select_uniform",
    "token_forms",
    "uses_blocks",
]
