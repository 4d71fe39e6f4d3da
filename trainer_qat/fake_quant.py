# SPDX-License-Identifier: Apache-2.0
"""The trainer's quant-dequant as an opaque operator, and its straight-through gradient.

The operator runs the reference path of `vllm_quads.nvfp4`. torch.compile sees one node and cannot change its
arithmetic (Inductor replaces division by an approximate reciprocal and fuses multiply-add, which would give other
codes than the rollout's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_quads.nvfp4 import encode_scale, fake_quantize_weight, quantize_weight, weight_amax
from vllm_quads.nvfp4.formats import BLOCK_SIZE, E2M1_MAX


@torch.library.custom_op("quads::fake_quantize_weight", mutates_args=())
def fake_quantize(weight: Tensor, amax: Tensor, name: str) -> Tensor:
    """Quantize and dequantize a weight [..., N, K] with amax float32 [...]; the result has the weight's dtype.

    Raises FormatError on NaN or Inf, naming the weight.
    """
    return fake_quantize_weight(weight, amax=amax, name=name)


@torch.library.custom_op("quads::weight_amax", mutates_args=())
def matrix_amax(weight: Tensor, name: str) -> Tensor:
    """max |BF16(W)| of each [N, K] matrix, float32 [...]. Raises FormatError on NaN or Inf, naming the weight."""
    return weight_amax(weight.to(torch.bfloat16), name)


@torch.library.custom_op("quads::representable", mutates_args=())
def representable(weight: Tensor, amax: Tensor) -> Tensor:
    """bool [..., N, K]: True where the quantizer does not saturate, |W| <= 6 * block scale * decode scale."""
    q = quantize_weight(weight, amax=amax)
    decode = torch.ones_like(amax) / encode_scale(amax)
    largest = (E2M1_MAX * q.scales.to(torch.float32)) * decode[..., None, None]
    return weight.to(torch.bfloat16).abs().to(torch.float32) <= largest.repeat_interleave(BLOCK_SIZE, dim=-1)


@fake_quantize.register_fake
def _(weight: Tensor, amax: Tensor, name: str) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@matrix_amax.register_fake
def _(weight: Tensor, name: str) -> Tensor:
    return weight.new_empty(weight.shape[:-2], dtype=torch.float32)


@representable.register_fake
def _(weight: Tensor, amax: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)


class StraightThrough(torch.autograd.Function):
    """Forward: the quantized weight. Backward: the gradient of the quantized weight goes to the master weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantized: Tensor) -> Tensor:
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class ClampedStraightThrough(torch.autograd.Function):
    """As StraightThrough, but zero where the quantizer saturates (the gradient of a clamp)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantized: Tensor, amax: Tensor) -> Tensor:
        # The mask is recomputed in the backward pass: the weight is alive anyway, a mask would be a byte per element.
        ctx.save_for_backward(weight, amax)
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, amax = ctx.saved_tensors
        return grads[0] * representable(weight, amax), None, None
