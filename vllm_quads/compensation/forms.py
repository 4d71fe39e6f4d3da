# SPDX-License-Identifier: Apache-2.0
"""Residual activation compensation of one GEMM operand, and the three forms in which it can be multiplied.

    y = Wq Q(x) + Wq[:, S] Q(x - Q(x))[S]

Q(x - Q(x)) is the second NVFP4 quantization of what the first one lost, with its own block scales and the same global
scale (QUADS, arXiv 2607.15810; the appended form is ARCQuant's, arXiv 2601.07475). Weights are only copied or
multiplied with again, never re-quantized.

    appended   [M, K+S] x [N, K+S]   selected 16-channel blocks behind the others, along K
    stacked    [2M, K]  x [N, K]     the residual of all channels as a second row; the pair is summed after the GEMM
    merged     [M, K]   x [N, K]     Q(x) + scatter(Q(r)) rounded to 16 bits, where W4A4 is emulated anyway
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.reference import BlockScaleRule, Quantized, encode_scale, quantize_blocks


class Compensated(NamedTuple):
    """An activation operand and its residual; both decode with the same global scale."""

    main: Quantized
    residual: Quantized


def quantize_with_residual(
    x: Tensor,
    *,
    rule: BlockScaleRule = BlockScaleRule.MAX_TO_SIX,
    g: Tensor | None = None,
    center: Tensor | None = None,
) -> Compensated:
    """Quantize activations [M, K] and the residual of every channel.

    g: float32 encode global scale, broadcastable to [M, 1]; None means one per token, from the row's amax after
    centring. center: float32 [K], subtracted first. The residual x - (q s)(1/g) is taken in float32 with one rounding
    per operation, and its blocks always map their amax to 6.
    """
    x = x.to(torch.float32)
    if center is not None:
        x = x - center
    if g is None:
        g = encode_scale(x.abs().amax(dim=-1, keepdim=True), rule)
    main = quantize_blocks(x, g, rule)
    return Compensated(main, quantize_blocks(x - main.dequantize(), g))


def columns_of(blocks: Tensor) -> Tensor:
    """Channel indices int64 [S] of the selected blocks (bool [K/16]), in ascending order."""
    first = blocks.nonzero().flatten() * BLOCK_SIZE
    return (first[:, None] + torch.arange(BLOCK_SIZE, device=blocks.device)).flatten()


def operand_pairs(c: Compensated) -> Tensor:
    """Both operands in scaled units, float32 [M, 2, K]: Q(x), then its residual. The other forms are cut from it."""
    return torch.stack((c.main.scaled(), c.residual.scaled()), dim=-2)


def append_columns(pairs: Tensor, columns: Tensor) -> Tensor:
    """Operand float32 [M, K+S] from `operand_pairs`: Q(x), then the residual of the selected channels."""
    if not columns.numel():
        return pairs[..., 0, :]
    return torch.cat((pairs[..., 0, :], pairs[..., 1, :].index_select(-1, columns)), dim=-1)


def appended(c: Compensated, columns: Tensor) -> Tensor:
    """Operand float32 [M, K+S] in scaled units: Q(x), then the residual of the selected channels."""
    return append_columns(operand_pairs(c), columns)


def appended_weight(weight: Tensor, columns: Tensor) -> Tensor:
    """Weight [..., N, K+S]: the selected columns copied behind the others (exact: codes and scales are copied)."""
    return torch.cat((weight, weight.index_select(-1, columns)), dim=-1)


def stacked(c: Compensated) -> Tensor:
    """Operand float32 [2M, K]: row 2i is Q(x_i), row 2i+1 its residual. Undo with `sum_pairs` after the GEMM."""
    return operand_pairs(c).flatten(-3, -2)


def sum_pairs(y: Tensor) -> Tensor:
    """[2M, N] to [M, N]: the sum of each row pair."""
    return y[0::2] + y[1::2]


def merged(c: Compensated, blocks: Tensor | None = None, dtype: torch.dtype = torch.float16) -> Tensor:
    """Operand [M, K] in scaled units: Q(x) + scatter(Q(r)), rounded once to dtype.

    blocks: bool [K/16], broadcastable to [M, K/16]; None selects every block. The sum needs up to 22 significant bits
    (exact in FP32), so unlike the operands of the other forms it is rounded: relative error at most 2^-11 in FP16 and
    2^-8 in BF16.
    """
    residual = c.residual.scaled()
    if blocks is not None:
        residual = residual * blocks.repeat_interleave(BLOCK_SIZE, dim=-1)
    return (c.main.scaled() + residual).to(dtype)
