# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in each of its processes (entry point group `vllm.general_plugins`)."""

from __future__ import annotations

import logging

METHOD = "quads"


def register() -> None:
    """Register the `quads` quantization method, weight-transfer backend and refit adapters.

    Cheap, and harmless if called again.

    vLLM swallows what a plugin raises and then only says "Unknown quantization method: quads", so the reason is logged
    before it is raised again.
    """
    try:
        _register()
    except Exception as e:
        logging.getLogger("vllm.quads").error(
            "vllm-quads could not be registered, so --quantization quads is unknown: %s: %s. "
            "Run `quads doctor` to see what is missing.",
            type(e).__name__,
            e,
        )
        raise


def _register() -> None:
    import torch
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform

    from vllm_quads.plugin import compat, serving
    from vllm_quads.plugin.config import QuadsConfig
    from vllm_quads.plugin.inprocess import adapt
    from vllm_quads.refit import register_adapter

    if current_platform.is_cpu() and hasattr(torch.cpu, "_init_amx"):
        # vLLM's CPU attention uses AMX without asking the kernel for it: worker processes die of SIGILL otherwise.
        torch.cpu._init_amx()
    register_quantization_config(METHOD)(QuadsConfig)
    compat.register_transfer_backend(METHOD, "QuadsTransferEngine", "vllm_quads.plugin.transfer")
    register_adapter(serving.adapt)  # first: it leaves engines in this process to the other
    register_adapter(adapt)
