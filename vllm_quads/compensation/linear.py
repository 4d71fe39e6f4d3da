# SPDX-License-Identifier: Apache-2.0
"""Reference forward of one quantized matrix: the exact W4A4 GEMM with residual compensation, in plain torch.

Operands are q * s in float32 (exact), the accumulator is float32, and both global scales are applied to it afterwards.
Native and fused kernels are checked against these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_quads.compensation.forms import (
    Compensated,
    append_columns,
    appended_weight,
    columns_of,
    operand_pairs,
    quantize_with_residual,
    sum_pairs,
)
from vllm_quads.compensation.policy import TokenForms, token_forms, uses_blocks
from vllm_quads.compensation.state import SiteState
from vllm_quads.compensation.statistics import SiteStatistics
from vllm_quads.nvfp4.contract import Centering, Contract, Scheme


@dataclass(frozen=True)
class PreparedMatrix:
    """A weight ready to be multiplied with: appended columns in place, global scales per output channel."""

    weight: Tensor
    """float32 [N, K+S] in scaled units (q * s); the last S columns are copies of the selected ones."""
    decode: Tensor
    """float32 [N]: decode global scale of each output channel."""
    columns: Tensor
    """int64 [S]: the channels that are appended."""
    bias: Tensor | None
    """float32 [N]: W @ center, or None without centring."""

    @property
    def k(self) -> int:
        """Channels without the appended ones."""
        return self.weight.shape[1] - self.columns.numel()


def prepare_matrix(
    scaled: Tensor, decode: Tensor, blocks: Tensor | None = None, center: Tensor | None = None
) -> PreparedMatrix:
    """Prepare a matrix from scaled float32 [N, K] (`PackedTensor.scaled`) and decode scales float32 [N].

    blocks: bool [K/16], appended along K; center: float32 [K], folded into a bias.
    """
    columns = columns_of(blocks) if blocks is not None else torch.empty(0, dtype=torch.int64, device=scaled.device)
    bias = (scaled @ center) * decode if center is not None and bool(center.any()) else None
    weight = appended_weight(scaled, columns) if columns.numel() else scaled
    return PreparedMatrix(weight, decode, columns, bias)


def under_contract(matrix: PreparedMatrix, contract: Contract) -> PreparedMatrix:
    """The matrix without what the contract does not use: it has the last word over a state that was loaded or kept."""
    if not uses_blocks(contract) and matrix.columns.numel():
        matrix = replace(matrix, weight=matrix.weight[:, : matrix.k], columns=matrix.columns[:0])
    if contract.activation.centering is Centering.NONE and matrix.bias is not None:
        matrix = replace(matrix, bias=None)
    return matrix


def center_under_contract(site: SiteState | None, contract: Contract) -> Tensor | None:
    """The site's centring vector, or None if the contract does not centre."""
    return None if site is None or contract.activation.centering is Centering.NONE else site.center


def multiply(c: Compensated, forms: TokenForms, matrix: PreparedMatrix) -> Tensor:
    """y float32 [M, N] = compensated operand x matrix, each token in its form; bias and both global scales applied."""
    return multiply_pairs(operand_pairs(c), c.main.decode_scale, forms, matrix)


def multiply_pairs(pairs: Tensor, decode_scale: Tensor, forms: TokenForms, matrix: PreparedMatrix) -> Tensor:
    """`multiply` from `operand_pairs` float32 [M, 2, K] and decode scales float32, broadcastable to [M, 1]."""
    y = _accumulate(pairs, forms, matrix).mul_(decode_scale).mul_(matrix.decode)
    return y if matrix.bias is None else y.add_(matrix.bias)


def _accumulate(pairs: Tensor, forms: TokenForms, matrix: PreparedMatrix) -> Tensor:
    """The float32 accumulator [M, N], before the global scales."""
    if not forms.rows.numel():
        return append_columns(pairs, matrix.columns) @ matrix.weight.T
    if not forms.blocks.numel():
        return sum_pairs(pairs.flatten(0, 1) @ matrix.weight[:, : matrix.k].T)
    y = pairs.new_empty(pairs.shape[0], matrix.weight.shape[0])
    y[forms.blocks] = append_columns(pairs[forms.blocks], matrix.columns) @ matrix.weight.T
    y[forms.rows] = sum_pairs(pairs[forms.rows].flatten(0, 1) @ matrix.weight[:, : matrix.k].T)
    return y


def multiply_unquantized(x: Tensor, matrix: PreparedMatrix) -> Tensor:
    """W4A16: y float32 [M, N] = x [M, K] (any float dtype) x matrix."""
    return (x.to(torch.float32) @ matrix.weight[:, : matrix.k].T) * matrix.decode


def linear_forward(
    x: Tensor,
    matrix: PreparedMatrix,
    contract: Contract,
    *,
    site: SiteState | None = None,
    g: Tensor | None = None,
    decode: Tensor | None = None,
    statistics: SiteStatistics | None = None,
) -> Tensor:
    """Dense linear under the contract: x [M, K] to y [M, N], in x's dtype.

    g: static encode global scale (float32 scalar); None means per token. decode: see `token_forms`. `matrix` was
    prepared with the blocks and the centring vector of `site`; those that the contract does not use are left out.
    """
    if contract.scheme is Scheme.W4A16:
        return multiply_unquantized(x, matrix).to(x.dtype)
    center = center_under_contract(site, contract)
    c = quantize_with_residual(x, rule=contract.activation.block_scale_rule, g=g, center=center)
    if statistics is not None:
        statistics.update(x, quantization_error(x, c, center))
    forms = token_forms(contract.compensation.form, x.shape[0], decode, x.device)
    return multiply(c, forms, under_contract(matrix, contract)).to(x.dtype)


def quantization_error(x: Tensor, c: Compensated, center: Tensor | None) -> Tensor:
    """What Q(x) loses, float32 [M, K]: (x - center) - Q(x - center), before it is quantized a second time."""
    x = x.to(torch.float32)
    return (x if center is None else x - center) - c.main.dequantize()
