# SPDX-License-Identifier: Apache-2.0
"""Random MoE layers for the QUADS kernels, and their output in FP64 from the same codes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_quads.bench import tables
from vllm_quads.bench.shapes import MoEShape
from vllm_quads.compensation import merged, quantize_with_residual
from vllm_quads.kernels import MoECompensation, PreparedMoE, prepare_moe_weights, quads_moe
from vllm_quads.kernels.layout import by_chunk
from vllm_quads.nvfp4 import BlockScaleRule, PackedTensor

DISTINCT = 4
"""Experts that are made; the others repeat them in random order, which costs a kernel as much as distinct ones."""
Inputs = tuple[Tensor, Tensor, Tensor]
"""x bfloat16 [M, H], router weights float32 [M, k], expert ids int32 [M, k]."""


@dataclass(frozen=True)
class Variant:
    """A setting of the QUADS kernels that is measured."""

    name: str
    ratio: float
    """Share of the 16-channel blocks that get their residual; 1.0 takes every block, as the default contract does."""
    four_over_six: bool
    centering: bool


PLAIN = Variant("QUADS plain W4A4", 0.0, False, False)
NO_RAC = Variant(tables.NO_RAC, 0.0, True, True)
QUARTER = Variant(tables.QUARTER, 0.25, True, True)
DEFAULT = Variant(tables.DEFAULT, 1.0, True, True)
VARIANTS = (PLAIN, NO_RAC, QUARTER, DEFAULT)


class RandomLayer:
    """Weights N(0, 0.05²) in NVFP4, ready for the kernels and for the reference."""

    def __init__(self, shape: MoEShape, seed: int, device: str = "cuda") -> None:
        gen = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        hidden, intermediate = shape.hidden, shape.intermediate
        self.shape = shape
        made = min(shape.experts, DISTINCT)
        self._w13 = [PackedTensor.quantize(_normal((2, intermediate, hidden), gen)) for _ in range(made)]
        self._w2 = [PackedTensor.quantize(_normal((hidden, intermediate), gen)) for _ in range(made)]
        self._source: list[int] = torch.randint(0, made, (shape.experts,), device=device, generator=gen).tolist()

    @cached_property
    def packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Codes, block scales and decode scales of w13 [E, 2I, ...], then of w2 [E, H, ...]."""
        w13, w2 = [self._w13[i] for i in self._source], [self._w2[i] for i in self._source]
        return (
            torch.stack([w.codes.flatten(0, 1) for w in w13]),
            _stack_scales([w.block_scales.view(torch.uint8).flatten(0, 1) for w in w13]),
            torch.stack([w.decode_scale for w in w13]),
            torch.stack([w.codes for w in w2]),
            _stack_scales([w.block_scales for w in w2]),
            torch.stack([w.decode_scale for w in w2]),
        )

    @cached_property
    def _prepared(self) -> PreparedMoE:
        prepared = prepare_moe_weights(*self.packed)
        del self.packed  # only the kernels' layout stays on the card
        return prepared

    def compensation(self, variant: Variant, seed: int = 0) -> MoECompensation:
        """Random block sets of the variant's size per site and expert, and a small centring vector."""
        gen = torch.Generator(device=self._device).manual_seed(seed)
        experts, hidden, intermediate = self.shape.experts, self.shape.hidden, self.shape.intermediate
        center = torch.randn(hidden, device=self._device, generator=gen) * 0.01
        bias = torch.randn(experts, 2 * intermediate, device=self._device, generator=gen) * 0.01
        partial = 0.0 < variant.ratio < 1.0
        return MoECompensation(
            mask13=_blocks(1, hidden // 16, variant.ratio, gen) if partial else None,
            mask2=_blocks(experts, intermediate // 16, variant.ratio, gen) if partial else None,
            center13=center if variant.centering else None,
            center13_by_chunk=by_chunk(center) if variant.centering else None,
            bias13=bias if variant.centering else None,
            full_all=variant.ratio >= 1.0,
        )

    def forward(self, inputs: Inputs, variant: Variant, compensation: MoECompensation) -> Tensor:
        """y bfloat16 [M, H] by the kernels."""
        x, weights, ids = inputs
        return quads_moe(
            x, self._prepared, weights, ids, compensation=compensation, four_over_six=variant.four_over_six
        )

    def reference(self, inputs: Inputs, variant: Variant, c: MoECompensation) -> Tensor:
        """y float64 [M, H]: operands of the torch reference, FP64 GEMMs, h rounded once to BF16 as the contract says.

        It shares no code with the kernels. What both do once more, rounding h to BF16 and quantizing it, can fall on
        the other side of a boundary where the FP32 sum differs from the FP64 sum; that difference counts as error.
        """
        x, weights, ids = inputs
        rule = BlockScaleRule.FOUR_OVER_SIX if variant.four_over_six else BlockScaleRule.MAX_TO_SIX
        a = self._operand(x, rule, c.mask13, c)
        out = torch.zeros(x.shape[0], self.shape.hidden, dtype=torch.float64, device=x.device)
        decoded: dict[int, tuple[Tensor, Tensor]] = {}
        for e in ids.unique().tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            source = self._source[e]
            if source not in decoded:
                decoded[source] = _double(self._w13[source]), _double(self._w2[source])
            w13, w2 = decoded[source]
            gate, up = a[token] @ w13[0].T, a[token] @ w13[1].T
            if c.bias13 is not None:
                gate = gate + c.bias13[e, : self.shape.intermediate]
                up = up + c.bias13[e, self.shape.intermediate :]
            h = (silu(gate) * up).to(x.dtype)
            mask = None if c.mask2 is None else c.mask2[e : e + 1]
            y = self._operand(h, rule, mask, c, centered=False) @ w2.T
            out.index_add_(0, token, y * weights[token, slot].double()[:, None])
        return out

    @staticmethod
    def _operand(
        x: Tensor, rule: BlockScaleRule, mask: Tensor | None, c: MoECompensation, *, centered: bool = True
    ) -> Tensor:
        q = quantize_with_residual(x, rule=rule, center=c.center13 if centered else None)
        if c.full_all:
            values = merged(q)
        else:
            chosen = torch.zeros(1, x.shape[1] // 16, dtype=torch.bool, device=x.device) if mask is None else mask
            values = merged(q, chosen.expand(x.shape[0], -1))
        return values.double() * q.main.decode_scale.double()


def uniform_inputs(shape: MoEShape, tokens: int, seed: int, device: str = "cuda") -> Inputs:
    """Activations N(0, 1) and uniform routing without replacement."""
    gen = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, device=device, generator=gen).to(torch.bfloat16)
    scores = torch.rand(tokens, shape.experts, device=device, generator=gen)
    ids = scores.topk(shape.top_k, 1).indices.to(torch.int32).contiguous()
    weights = torch.softmax(torch.randn(tokens, shape.top_k, device=device, generator=gen), 1)
    return x, weights, ids


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| (Frobenius), in FP64."""
    return float((got.double() - want).norm() / want.norm())


def _normal(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return (torch.randn(shape, device=gen.device, generator=gen) * 0.05).to(torch.bfloat16)


def _blocks(groups: int, blocks: int, ratio: float, gen: torch.Generator) -> Tensor:
    """bool [groups, blocks] with exactly round(ratio * blocks) set in each group, as a contract selects."""
    order = torch.rand(groups, blocks, device=gen.device, generator=gen).argsort(dim=1)
    return order.argsort(dim=1) < round(ratio * blocks)


def _stack_scales(scales: list[Tensor]) -> Tensor:
    # as bytes: float8 tensors lack kernels in some torch releases
    return torch.stack([s.view(torch.uint8) for s in scales]).view(torch.float8_e4m3fn)


def _double(p: PackedTensor) -> Tensor:
    return p.scaled().double() * p.decode_scale.double()[..., None, None]
