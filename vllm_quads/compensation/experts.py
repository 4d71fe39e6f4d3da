# SPDX-License-Identifier: Apache-2.0
"""Reference forward of a quantized MoE layer: two grouped W4A4 GEMMs with SiLU·mul between them, in plain torch.

    h = silu(gate) * up    in float32 from the float32 outputs of w13, rounded once to the activation dtype
    y = sum over top-k of router weight * w2(h)    in float32, rounded once to the activation dtype

Activation quantization of w13's input happens once per token, of w2's input once per (token, expert) pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_quads.compensation.forms import Compensated, operand_pairs, quantize_with_residual
from vllm_quads.compensation.linear import (
    PreparedMatrix,
    center_under_contract,
    multiply_pairs,
    multiply_unquantized,
    prepare_matrix,
    quantization_error,
    under_contract,
)
from vllm_quads.compensation.policy import token_forms
from vllm_quads.compensation.state import SiteState
from vllm_quads.compensation.statistics import SiteStatistics
from vllm_quads.nvfp4.contract import Contract, Scheme
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import unpack_codes
from vllm_quads.nvfp4.reference import decode_packed


@dataclass(frozen=True)
class PreparedExperts:
    """The local experts of one layer, ready to be multiplied with."""

    w13: list[PreparedMatrix]
    w2: list[PreparedMatrix]


def prepare_experts(
    w13: tuple[Tensor, Tensor, Tensor],
    w2: tuple[Tensor, Tensor, Tensor],
    w13_site: SiteState | None = None,
    w2_site: SiteState | None = None,
) -> PreparedExperts:
    """Decode packed experts to float32 operands.

    w13: codes uint8 [E, 2I, H/2], block scales E4M3 [E, 2I, H/16], decode scales float32 [E, 2] (gate, up);
    w2: codes uint8 [E, H, I/2], block scales E4M3 [E, H, I/16], decode scales float32 [E].
    The sites' blocks are appended and w13's centring vector is folded into a bias. Raises FormatError unless w2_site
    has one group per expert.
    """
    if w2_site is not None and w2_site.blocks.shape[0] != w2[0].shape[0]:
        raise FormatError(
            f"w2_site: has blocks for {w2_site.blocks.shape[0]} experts, but {w2[0].shape[0]} experts are prepared; "
            f"under expert parallelism select the local ones first"
        )
    prepared13, prepared2 = [], []
    half = w13[0].shape[1] // 2
    for e in range(w13[0].shape[0]):
        scaled = decode_packed(unpack_codes(w13[0][e]), w13[1][e])
        decode = w13[2][e].repeat_interleave(half)
        center = w13_site.center if w13_site is not None else None
        prepared13.append(prepare_matrix(scaled, decode, w13_site.blocks[0] if w13_site else None, center))
        scaled = decode_packed(unpack_codes(w2[0][e]), w2[1][e])
        decode = w2[2][e].expand(scaled.shape[0])
        prepared2.append(prepare_matrix(scaled, decode, w2_site.blocks[e] if w2_site else None))
    return PreparedExperts(prepared13, prepared2)


def experts_forward(
    x: Tensor,
    experts: PreparedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    contract: Contract,
    *,
    w13_site: SiteState | None = None,
    g13: Tensor | None = None,
    g2: Tensor | None = None,
    decode: Tensor | None = None,
    w13_statistics: SiteStatistics | None = None,
    w2_statistics: SiteStatistics | None = None,
) -> Tensor:
    """MoE layer under the contract: x [M, H] to [M, H], in x's dtype.

    topk_weights float32 [M, k]; topk_ids integer [M, k], local expert ids, negative for experts that live elsewhere
    (they contribute nothing here). g13 (float32 scalar) and g2 (float32 [E]) are static encode global scales; None
    means one per token. decode: see `policy.token_forms`. w13_site is the one that `experts` were prepared with; blocks
    and centring that the contract does not use are left out.
    """
    pairs = _Pairs.of(topk_ids, len(experts.w13))
    quantized = contract.scheme is Scheme.W4A4
    rule = contract.activation.block_scale_rule
    c13 = None
    if quantized:
        center = center_under_contract(w13_site, contract)
        c13 = quantize_with_residual(x, rule=rule, g=g13, center=center)
        if w13_statistics is not None:
            w13_statistics.update(x, quantization_error(x, c13, center))
    pair_decode = decode[pairs.token] if decode is not None else None

    y13 = _grouped(x, c13, pairs, pairs.token, experts.w13, contract, pair_decode)
    gate, up = y13.chunk(2, dim=-1)
    h = (silu(gate) * up).to(x.dtype)

    c2 = None
    if quantized:
        c2 = quantize_with_residual(h, rule=rule, g=None if g2 is None else g2[pairs.expert][:, None])
        if w2_statistics is not None:
            w2_statistics.update(h, quantization_error(h, c2, None), pairs.expert)
    y2 = _grouped(h, c2, pairs, None, experts.w2, contract, pair_decode)

    weight = topk_weights.to(torch.float32).flatten()[pairs.slot]
    out = torch.zeros(x.shape[0], y2.shape[1], dtype=torch.float32, device=x.device)
    out.index_add_(0, pairs.token, y2 * weight[:, None])
    return out.to(x.dtype)


@dataclass(frozen=True)
class _Pairs:
    """(token, expert) pairs sorted by expert; within an expert, by token."""

    token: Tensor
    """int64 [P]: row of x."""
    expert: Tensor
    """int64 [P]: local expert."""
    slot: Tensor
    """int64 [P]: position in the flattened [M, k] top-k tensors."""
    counts: list[int]
    """Pairs of each expert."""

    @staticmethod
    def of(topk_ids: Tensor, num_experts: int) -> _Pairs:
        flat = topk_ids.flatten().to(torch.int64)
        slot = flat.argsort(stable=True)
        slot = slot[flat[slot] >= 0]
        expert = flat[slot]
        counts = torch.bincount(expert, minlength=num_experts).tolist()
        if len(counts) > num_experts:
            raise FormatError(
                f"topk_ids: names local expert {len(counts) - 1}, but there are {num_experts}; "
                f"map global expert ids to local ones, and to -1 where the expert lives elsewhere"
            )
        return _Pairs(slot // topk_ids.shape[1], expert, slot, counts)


def _grouped(
    x: Tensor,
    c: Compensated | None,
    pairs: _Pairs,
    rows: Tensor | None,
    matrices: list[PreparedMatrix],
    contract: Contract,
    pair_decode: Tensor | None,
) -> Tensor:
    """float32 [P, N]: each pair's row of the operand times its expert's matrix.

    rows: int64 [P], each pair's row of x; None if x has one row per pair already.
    """
    operand = x if c is None else operand_pairs(c)
    scale = None if c is None else c.main.decode_scale.expand(x.shape[0], 1)
    outputs, start = [], 0
    for matrix, count in zip(matrices, pairs.counts, strict=True):
        here = slice(start, start + count)
        start += count
        if not count:
            continue
        own = operand[here] if rows is None else operand[rows[here]]
        if scale is None:
            outputs.append(multiply_unquantized(own, matrix))
            continue
        own_scale = scale[here] if rows is None else scale[rows[here]]
        own_decode = None if pair_decode is None else pair_decode[here]
        forms = token_forms(contract.compensation.form, count, own_decode, x.device)
        outputs.append(multiply_pairs(own, own_scale, forms, under_contract(matrix, contract)))
    if not outputs:
        return torch.zeros(0, matrices[0].weight.shape[0], dtype=torch.float32, device=x.device)
    return torch.cat(outputs)
