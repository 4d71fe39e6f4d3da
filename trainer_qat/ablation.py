# SPDX-License-Identifier: Apache-2.0
"""Symmetric W4A4 fake quantization of the trainer: an ablation arm, not a recommendation.

QUADS trains asymmetrically: quantized weights, activations in full precision. Rounding the trainer's activations as
well, as other recipes do, makes both sides round slightly different numbers on a coarse grid. This arm exists so that
the two can be compared on a user's own model. Activations are quantized and dequantized with a global scale per token,
without centring or compensation, and rounded to their dtype; the gradient is straight-through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_qat.fake_quant import StraightThrough
from vllm_quads.nvfp4 import (
    ActivationGlobalScale,
    BlockScaleRule,
    Contract,
    ContractError,
    Scheme,
    quantize_activation,
)


@torch.library.custom_op("quads::fake_quantize_activation", mutates_args=())
def _fake_quantize(x: Tensor, rule: str) -> Tensor:
    quantized = quantize_activation(x.flatten(0, -2), rule=BlockScaleRule(rule))
    return quantized.dequantize().to(x.dtype).view(x.shape)


@_fake_quantize.register_fake
def _(x: Tensor, rule: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_quantize_activation(x: Tensor, contract: Contract) -> Tensor:
    """x [..., K] as plain W4A4 without compensation would see it, in x's dtype; its gradient goes straight to x."""
    with torch.no_grad():
        quantized = _fake_quantize(x, contract.activation.block_scale_rule.value)
    out: Tensor = StraightThrough.apply(x, quantized)
    return out


def check_ablation(contract: Contract) -> None:
    """Raise ContractError if this contract leaves nothing to compare with."""
    if contract.scheme is not Scheme.W4A4:
        raise ContractError(f"w4a4_ablation: needs scheme 'w4a4', the contract has {contract.scheme.value!r}")
    if contract.activation.global_scale is ActivationGlobalScale.STATIC:
        raise ContractError(
            "w4a4_ablation: needs activation.global_scale 'token'; a trainer has no static input scales"
        )
