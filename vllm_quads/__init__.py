# SPDX-License-Identifier: Apache-2.0
"""QUADS: NVFP4 W4A4 rollouts for RL with residual activation compensation, as a vLLM plugin.

`register` is the `vllm.general_plugins` entry point; everything else is imported from the
subpackages: `vllm_quads.nvfp4` (the shared quant-dequant path), `vllm_quads.compensation` (RAC),
`vllm_quads.checkpoint` (formats) and `vllm_quads.plugin` (vLLM integration).
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Register the `quads` quantization method with vLLM (called by vLLM in each of its processes)."""
    from vllm_quads.plugin.registration import register as _register

    _register()
