# SPDX-License-Identifier: Apache-2.0
"""Custom operators that keep torch.compile out of the layers: `torch.ops.vllm.quads_experts` and `quads_linear`.

The layer is found by name in the running engine's forward context, so that compiled graphs hold no state.
"""

from __future__ import annotations

from typing import cast

import torch

from vllm_quads.plugin import compat
from vllm_quads.plugin.runtime import ExpertsRuntime, LinearRuntime


def _experts(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, key: str) -> torch.Tensor:
    return cast(ExpertsRuntime, compat.forward_layer(key)).forward(x, topk_weights, topk_ids)


def _experts_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, key: str) -> torch.Tensor:
    return torch.empty_like(x)


def _linear(x: torch.Tensor, rows: int, key: str) -> torch.Tensor:
    return cast(LinearRuntime, compat.forward_layer(key)).forward(x)


def _linear_fake(x: torch.Tensor, rows: int, key: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def register_ops() -> None:
    """Register both operators, once per process."""
    compat.register_op("quads_experts", _experts, _experts_fake)
    compat.register_op("quads_linear", _linear, _linear_fake)
