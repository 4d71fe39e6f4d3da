# SPDX-License-Identifier: Apache-2.0
"""MoE backend for Hopper: the fused kernels of `vllm_quads.kernels` on packed weights.

The residual is merged into the operand before the GEMM, where it costs no GEMM time. So `auto` gives every token the
full residual here, decode and prefill alike, and nothing that a captured CUDA graph replays depends on the batch.
All buffers keep their addresses over refits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.compensation import SiteState, SiteStatistics
from vllm_quads.compensation.experts import experts_forward, prepare_experts
from vllm_quads.kernels import MoECompensation, PreparedMoE, prepare_moe_weights, quads_moe
from vllm_quads.nvfp4 import BlockScaleRule, Centering, Contract, Form, PackedTensor, Scheme
from vllm_quads.plugin.backends import local_ids

Packed = tuple[Tensor, Tensor, Tensor]


class HopperExperts:
    """`backends.ExpertsBackend` on compute capability 9.0."""

    splits_auto = False

    def __init__(self) -> None:
        self._moe: PreparedMoE | None = None
        self._bias13: Tensor | None = None
        self._packed: tuple[Packed, Packed] | None = None

    def prepare(self, w13: Packed, w2: Packed, w13_site: SiteState, w2_site: SiteState) -> None:
        self._moe = prepare_moe_weights(*w13, *w2, out=self._moe)
        self._packed = (w13, w2)
        bias = _bias(w13, w13_site.center)
        self._bias13 = bias if self._bias13 is None else self._bias13.copy_(bias)

    def forward(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        contract: Contract,
        *,
        expert_map: Tensor | None,
        w13_site: SiteState,
        w2_site: SiteState,
        g13: Tensor | None,
        g2: Tensor | None,
        decode: Tensor | None,
        w13_statistics: SiteStatistics | None,
        w2_statistics: SiteStatistics | None,
    ) -> Tensor:
        assert self._moe is not None
        assert self._packed is not None
        gathering = w13_statistics is not None or w2_statistics is not None
        if contract.scheme is Scheme.W4A16 or gathering or x.dtype is torch.float32:
            # Off the fast path: the reference, on operands decoded for this call alone. It cannot be captured, which
            # `config` sees to.
            return experts_forward(
                x,
                prepare_experts(*self._packed, w13_site, w2_site),
                topk_weights,
                local_ids(topk_ids, expert_map),
                contract,
                w13_site=w13_site,
                g13=g13,
                g2=g2,
                decode=torch.ones(x.shape[0], dtype=torch.bool, device=x.device),
                w13_statistics=w13_statistics,
                w2_statistics=w2_statistics,
            )
        return quads_moe(
            x,
            self._moe,
            topk_weights.to(torch.float32).contiguous(),
            topk_ids.contiguous(),
            compensation=self._compensation(contract, w13_site, w2_site),
            four_over_six=contract.activation.block_scale_rule is BlockScaleRule.FOUR_OVER_SIX,
            g13=g13,
            g2=g2,
            expert_map=expert_map,
        )

    def _compensation(self, contract: Contract, w13: SiteState, w2: SiteState) -> MoECompensation:
        form = contract.compensation.form
        blocks = form is Form.BLOCKS and contract.compensation.ratio > 0
        centered = contract.activation.centering is not Centering.NONE
        return MoECompensation(
            mask13=w13.blocks[0] if blocks else None,
            mask2=w2.blocks if blocks else None,
            center13=w13.center if centered else None,
            bias13=self._bias13 if centered else None,
            full_all=form in (Form.ROWS, Form.AUTO),
        )


def _bias(w13: Packed, center: Tensor) -> Tensor:
    """float32 [E, 2I]: W13 @ center, one expert at a time."""
    codes, scales, decode = w13
    half = codes.shape[1] // 2
    rows = []
    for e in range(codes.shape[0]):
        scaled = PackedTensor(codes[e], scales[e], decode[e, 0]).scaled()
        rows.append((scaled @ center) * decode[e].repeat_interleave(half))
    return torch.stack(rows)
