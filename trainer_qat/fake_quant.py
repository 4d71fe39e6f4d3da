# SPDX-License-Identifier: Apache-2.0
"""The trainer's quant-dequant as opaque operators, and its straight-through gradient.

On a GPU the operators run the Triton kernels of `vllm_quads.kernels.weights`, elsewhere the reference path of
`vllm_quads.nvfp4`; the bits are the same. torch.compile sees one node and cannot change its arithmetic (Inductor
replaces division by an approximate reciprocal and fuses multiply-add, which would give other codes than the rollout's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer_qat.finite import WATCH
from vllm_quads.kernels import weights as kernels
from vllm_quads.nvfp4 import weight_amax


@torch.library.custom_op("quads::fake_quantize_weight", mutates_args=())
def fake_quantize(weight: Tensor, amax: Tensor, name: str) -> Tensor:
    """Quantize and dequantize a weight [..., N, K] with amax float32 [...]; the result has the weight's dtype."""
    return kernels.fake_quantize_stack(weight, amax)


@torch.library.custom_op("quads::weight_amax", mutates_args=())
def matrix_amax(weight: Tensor, name: str) -> Tensor:
    """max |BF16(W)| of each [N, K] matrix, float32 [...].

    Raises FormatError on NaN or Inf, naming the weight; on a GPU later (see `trainer_qat.finite`).
    """
    if not weight.is_cuda:
        return weight_amax(weight.to(torch.bfloat16), name)
    amax = kernels.weight_amax(weight)
    WATCH.add(name, amax)
    return amax


@torch.library.custom_op("quads::representable", mutates_args=())
def representable(weight: Tensor, amax: Tensor) -> Tensor:
    """bool [..., N, K]: True where the quantizer does not saturate, |W| <= 6 * block scale * decode scale."""
    return kernels.representable(weight, amax)


@torch.library.custom_op("quads::clamp_gradient", mutates_args=())
def clamp_gradient(grad: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
    """grad [..., N, K] where the quantizer does not saturate, else 0."""
    return kernels.clamp_gradient(grad, weight, amax)


@fake_quantize.register_fake
def _(weight: Tensor, amax: Tensor, name: str) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@matrix_amax.register_fake
def _(weight: Tensor, name: str) -> Tensor:
    return weight.new_empty(weight.shape[:-2], dtype=torch.float32)


@representable.register_fake
def _(weight: Tensor, amax: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)


@clamp_gradient.register_fake
def _(grad: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


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
        return clamp_gradient(grads[0], weight, amax), None, None
