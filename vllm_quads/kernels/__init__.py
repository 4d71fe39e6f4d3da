# SPDX-License-Identifier: Apache-2.0
"""Hopper kernels: fused quantization with residual, and a W4A4 MoE layer on packed NVFP4 weights.

Imports torch and `vllm_quads.nvfp4` only; CUDA sources (`csrc/`) are compiled with nvcc at first use.
"""

from __future__ import annotations

from vllm_quads.kernels._native import KernelError, build
from vllm_quads.kernels.moe import MoECompensation, PreparedMoE, Tuning, prepare_moe_weights, quads_moe

__all__ = [
    "KernelError",
    "MoECompensation",
    "PreparedMoE",
    "Tuning",
    "build",
    "prepare_moe_weights",
    "quads_moe",
]
