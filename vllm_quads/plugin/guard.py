# SPDX-License-Identifier: Apache-2.0
"""No output of an engine that must not serve, whatever its CUDA graphs replay without asking.

Quantized layers ask for themselves, but a captured graph runs none of their Python: not with piecewise graphs in any
layer, not with full ones in the whole model. So the question is also asked before the model, and before logits are
computed, which is never captured.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_quads.plugin.config import QuadsConfig


def watch(model: nn.Module, config: QuadsConfig) -> None:
    """Let every forward pass of this model, and everything that is to be sampled from it, ask the config first."""

    def ask(module: nn.Module, args: Any) -> None:
        config.require_servable()

    model.register_forward_pre_hook(ask)
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_pre_hook(ask)


__all__ = ["watch"]
