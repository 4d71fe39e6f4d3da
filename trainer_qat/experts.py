# SPDX-License-Identifier: Apache-2.0
"""Fused experts with a way in between their two GEMMs, which transformers' own implementations do not have.

Tokens are sorted by expert and each expert is one GEMM: for observing, for ablations and for probes, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Transform = Callable[[Tensor], Tensor]
Watch = Callable[[str, Tensor, Tensor, Tensor], None]
"""Called with "gate_up_proj" or "down_proj", the GEMM's input, its output, and the expert of each output row."""


def sorted_experts(
    module: Any,
    gate_up: Tensor,
    down: Tensor,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    operand: Transform | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Forward of a transformers-5 experts module, [M, H] to [M, H].

    gate_up [E, 2I, H], down [E, H, I]; top_k_index int64 [M, k], top_k_weights [M, k]. `operand` is applied to the
    input rows of both GEMMs.
    """
    flat = top_k_index.flatten()
    order = flat.argsort(stable=True)
    order = order[flat[order] < module.num_experts]  # expert parallelism marks foreign experts with num_experts
    expert, token = flat[order], order // top_k_index.shape[1]
    counts = torch.bincount(expert, minlength=module.num_experts).tolist()

    x = hidden_states if operand is None else operand(hidden_states)
    y13 = _grouped(x[token], gate_up, counts)
    if watch is not None:
        watch("gate_up_proj", hidden_states, y13, expert)
    h = module._apply_gate(y13)
    y2 = _grouped(h if operand is None else operand(h), down, counts)
    if watch is not None:
        watch("down_proj", h, y2, expert)
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    out = out.index_add(0, token, (y2 * top_k_weights.flatten()[order, None]).to(torch.float32))
    return out.to(hidden_states.dtype)


def _grouped(x: Tensor, stack: Tensor, counts: list[int]) -> Tensor:
    parts = [nn.functional.linear(rows, weight) for rows, weight in zip(x.split(counts), stack, strict=True)]
    return torch.cat(parts)
