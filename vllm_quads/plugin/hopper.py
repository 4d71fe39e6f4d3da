# SPDX-License-Identifier: Apache-2.0
"""Backends for Hopper: the fused kernels of `vllm_quads.kernels` on packed weights.

The residual is merged into the operand before the GEMM, where it costs no GEMM time. So `auto` gives every token the
full residual here, decode and prefill alike, and nothing that a captured CUDA graph replays depends on the batch.
All buffers keep their addresses over refits.

Packed experts are stored once, in the order in which the kernels read them (`kernels.layout`); the layer's parameters
are empty then, and are filled again only while vLLM's own loaders write into them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_quads.compensation import SiteState
from vllm_quads.compensation.experts import prepare_experts
from vllm_quads.kernels import MoECompensation, PreparedMoE, prepare_moe_weights, quads_moe
from vllm_quads.kernels.install import Destination, ShardPlace
from vllm_quads.kernels.layout import by_chunk, unarrange
from vllm_quads.kernels.linear import LinearCompensation, PreparedLinear, prepare_linear, quads_linear
from vllm_quads.kernels.statistics import Gathering
from vllm_quads.kernels.weights import QuantizedStack, dequantize_stack
from vllm_quads.nvfp4 import BlockScaleRule, Centering, Contract, Form, PackedTensor, Scheme
from vllm_quads.plugin.backends import (
    ExpertsRequest,
    LinearRequest,
    Packed,
    Receipt,
    TorchLinear,
    channel_scales,
    reference_experts,
)

_BIAS_EXPERTS = 16
"""Experts that are decoded to float32 at once."""


class HopperExperts:
    """`backends.ExpertsBackend` on compute capability 9.0."""

    splits_auto = False

    def __init__(self) -> None:
        self._moe: PreparedMoE | None = None
        self._bias13: Tensor | None = None
        self._center13: Tensor | None = None
        self._is_centered = False
        self._destinations: dict[str, Destination] = {}

    def prepare(
        self, w13: Packed, w2: Packed, w13_site: SiteState, w2_site: SiteState, *, centered: bool = True
    ) -> None:
        if w13[0].numel():
            self._moe = prepare_moe_weights(*w13, *w2, out=self._moe)
        else:  # what is stored here has been written by `install`
            for target, source in self._decode_copies(w13[2], w2[2]):
                target.copy_(source)
        if self._has_bias_to_write(centered):
            bias = self._bias(w13_site.center) if centered else self._zero_bias()
            self._bias13 = bias if self._bias13 is None else self._bias13.copy_(bias)
            self._center13 = by_chunk(w13_site.center, self._center13)
            self._is_centered = centered

    def _has_bias_to_write(self, centered: bool) -> bool:
        return centered or self._bias13 is None or self._is_centered

    def _decode_copies(self, w13: Tensor, w2: Tensor) -> list[tuple[Tensor, Tensor]]:
        assert self._moe is not None
        return [(self._moe.w13_decode, w13), (self._moe.w2_decode, w2[:, None].expand(-1, 2))]

    def decode_copies(self, w13: Tensor, w2: Tensor, centered: bool) -> list[tuple[Tensor, Tensor]] | None:
        return None if self._has_bias_to_write(centered) else self._decode_copies(w13, w2)

    def forget(self) -> None:
        self._is_centered = True  # a bias of zeros has to be written, too

    def install(
        self, prefix: str, weights: QuantizedStack | Tensor, amax: Tensor | None, receipt: Receipt, place: ShardPlace
    ) -> None:
        out = self.stored(prefix)
        destination = self._destinations.get(prefix)
        if destination is None or destination.out is not out or destination.place != place:
            destination = self._destinations[prefix] = Destination(out, gate_up=prefix == "w13_", place=place)
        destination.install(weights, amax, receipt.sinks)

    def packed(self, prefix: str) -> tuple[Tensor, Tensor]:
        return self._read(prefix, slice(None))

    def stored(self, prefix: str) -> Tensor:
        assert self._moe is not None
        return self._moe.w13 if prefix == "w13_" else self._moe.w2

    def _read(self, prefix: str, experts: slice) -> tuple[Tensor, Tensor]:
        moe = self._moe
        assert moe is not None
        rows, k = (2 * moe.intermediate, moe.hidden) if prefix == "w13_" else (moe.hidden, moe.intermediate)
        return unarrange(self.stored(prefix)[experts], rows, k, gate_up=prefix == "w13_")

    def _bias(self, center: Tensor) -> Tensor:
        """float32 [E, 2I]: W13 @ center, a few experts at a time."""
        moe = self._moe
        assert moe is not None
        one = torch.ones(moe.num_experts, dtype=torch.float32, device=center.device)
        rows = []
        for first in range(0, moe.num_experts, _BIAS_EXPERTS):
            part = slice(first, first + _BIAS_EXPERTS)
            scaled = dequantize_stack(QuantizedStack(*self._read("w13_", part), one[part]), dtype=torch.float32)
            rows.append((scaled @ center) * moe.w13_decode[part].repeat_interleave(moe.intermediate, dim=1))
        return torch.cat(rows)

    def _zero_bias(self) -> Tensor:
        """The bias of a centre that is zero."""
        moe = self._moe
        assert moe is not None
        return moe.w13_decode.new_zeros(moe.num_experts, 2 * moe.intermediate)

    def forward(self, request: ExpertsRequest) -> Tensor:
        assert self._moe is not None
        r = request
        if r.x.dtype is torch.float32:
            # Off the fast path: the reference, on operands decoded for this call alone. It cannot be captured, which
            # `config` sees to.
            w13 = (*self.packed("w13_"), self._moe.w13_decode)
            w2 = (*self.packed("w2_"), self._moe.w2_decode[:, 0])
            prepared = prepare_experts(w13, w2, r.w13_site, r.w2_site)
            return reference_experts(r, prepared, torch.ones(r.x.shape[0], dtype=torch.bool, device=r.x.device))
        quantized = r.contract.scheme is Scheme.W4A4
        return quads_moe(
            r.x,
            self._moe,
            r.topk_weights.to(torch.float32).contiguous(),
            r.topk_ids.contiguous(),
            compensation=self._compensation(r.contract, r.w13_site, r.w2_site) if quantized else MoECompensation(),
            four_over_six=r.contract.activation.block_scale_rule is BlockScaleRule.FOUR_OVER_SIX,
            g13=r.g13,
            g2=r.g2,
            expert_map=r.expert_map,
            quantized=quantized,
            router_on_input=r.router_on_input,
            statistics=Gathering(r.w13_statistics, r.w2_statistics, r.valid) if r.w13_statistics is not None else None,
        )

    def _compensation(self, contract: Contract, w13: SiteState, w2: SiteState) -> MoECompensation:
        form = contract.compensation.form
        blocks = form is Form.BLOCKS and contract.compensation.ratio > 0
        centered = contract.activation.centering is not Centering.NONE
        return MoECompensation(
            mask13=w13.blocks[0] if blocks else None,
            mask2=w2.blocks if blocks else None,
            center13=w13.center if centered else None,
            center13_by_chunk=self._center13 if centered else None,
            bias13=self._bias13 if centered else None,
            full_all=form in (Form.ROWS, Form.AUTO),
        )


class HopperLinear:
    """`backends.LinearBackend` on compute capability 9.0."""

    splits_auto = False

    def __init__(self) -> None:
        self._linear: PreparedLinear | None = None
        self._bias: Tensor | None = None
        self._center: Tensor | None = None
        self._parts: list[PackedTensor] = []

    def prepare(self, parts: list[PackedTensor], site: SiteState, *, centered: bool = True) -> None:
        codes, scales = parts[0].codes, parts[0].block_scales
        if len(parts) > 1:
            codes = torch.cat([p.codes for p in parts])
            scales = torch.cat([p.block_scales.view(torch.uint8) for p in parts]).view(scales.dtype)
        self._linear = prepare_linear(codes, scales, channel_scales(parts), out=self._linear)
        self._parts = parts
        rows = [(p.scaled() @ site.center) * p.decode_scale for p in parts] if centered else [_zeros(codes)]
        bias = torch.cat(rows)
        self._bias = bias if self._bias is None else self._bias.copy_(bias)
        self._center = by_chunk(site.center, self._center)

    def forget(self) -> None:
        if self._linear is not None:
            self._linear.ones.fill_(1)

    def forward(self, request: LinearRequest) -> Tensor:
        assert self._linear is not None
        r = request
        if r.x.dtype is torch.float32:
            reference = TorchLinear()
            reference.prepare(self._parts, r.site)
            return reference.forward(replace(r, decode=torch.ones(r.x.shape[0], dtype=torch.bool, device=r.x.device)))
        quantized = r.contract.scheme is Scheme.W4A4
        return quads_linear(
            r.x,
            self._linear,
            compensation=self._compensation(r.contract, r.site) if quantized else LinearCompensation(),
            four_over_six=r.contract.activation.block_scale_rule is BlockScaleRule.FOUR_OVER_SIX,
            g=r.g,
            quantized=quantized,
            statistics=Gathering(r.statistics, valid=r.valid) if r.statistics is not None else None,
        )

    def _compensation(self, contract: Contract, site: SiteState) -> LinearCompensation:
        form = contract.compensation.form
        centered = contract.activation.centering is not Centering.NONE
        return LinearCompensation(
            mask=site.blocks[0] if form is Form.BLOCKS and contract.compensation.ratio > 0 else None,
            center=site.center if centered else None,
            center_by_chunk=self._center if centered else None,
            bias=self._bias if centered else None,
            full_all=form in (Form.ROWS, Form.AUTO),
        )


def _zeros(codes: Tensor) -> Tensor:
    """The bias of a centre that is zero, for codes [..., N, K/2]."""
    return torch.zeros(codes.shape[:-1], dtype=torch.float32, device=codes.device)
