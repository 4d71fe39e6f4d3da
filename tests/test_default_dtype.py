# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on torch's default dtype.

vLLM sets it to the model's while it loads weights, and before 0.30 leaves it so when a start fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rac_data import Layer, activations, random_site, routing
from torch import Tensor

from vllm_quads.compensation import SiteInputs, SiteStatistics, experts_forward, linear_forward, prepare_matrix, refresh
from vllm_quads.nvfp4 import Activation, Centering, Compensation, Contract, Form, PackedTensor, Scheme

LAYER, TOKENS = Layer(), 12
X = activations(TOKENS, LAYER.hidden)
WEIGHTS, IDS = routing(TOKENS, LAYER.experts, 2)
W13, W2 = random_site(LAYER.hidden, centered=True), random_site(LAYER.inter, LAYER.experts)
DECODE = torch.arange(TOKENS) < 5
CONTRACTS = [
    Contract(activation=Activation(centering=Centering.MEDIAN), compensation=Compensation(form)) for form in Form
] + [Contract(scheme=Scheme.W4A16)]


@pytest.fixture
def under() -> Iterator[Callable[[torch.dtype, Callable[[], list[Tensor]]], list[Tensor]]]:
    """under(dtype, fn): what fn returns while dtype is the default."""
    before = torch.get_default_dtype()

    def run(dtype: torch.dtype, fn: Callable[[], list[Tensor]]) -> list[Tensor]:
        torch.set_default_dtype(dtype)
        return fn()

    yield run
    torch.set_default_dtype(before)


def assert_same(under: Callable[..., list[Tensor]], fn: Callable[[], list[Tensor]]) -> None:
    expected = under(torch.float32, fn)
    for other in (torch.bfloat16, torch.float64):
        for mine, want in zip(under(other, fn), expected, strict=True):
            assert mine.dtype == want.dtype
            assert torch.equal(mine, want)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: f"{c.scheme.value}-{c.compensation.form.value}")
def test_forward(contract: Contract, under: Callable[..., list[Tensor]]) -> None:
    """Experts and linears give the same bits under every default dtype, also in a step without local tokens."""

    def forward() -> list[Tensor]:
        experts = LAYER.prepare(W13, W2)
        gate = LAYER.gate
        one = PackedTensor(gate.codes[0], gate.block_scales[0], gate.decode_scale[0])
        matrix = prepare_matrix(one.scaled(), one.decode_scale.expand(LAYER.inter), W13.blocks[0], W13.center)
        return [
            experts_forward(X, experts, WEIGHTS, IDS, contract, w13_site=W13, decode=DECODE),
            experts_forward(X, experts, WEIGHTS, torch.full_like(IDS, -1), contract, w13_site=W13, decode=DECODE),
            linear_forward(X, matrix, contract, site=W13, decode=DECODE),
        ]

    assert_same(under, forward)


@pytest.mark.parametrize("centering", list(Centering))
@pytest.mark.parametrize("seen", [True, False])
def test_refresh(centering: Centering, seen: bool, under: Callable[..., list[Tensor]]) -> None:
    """So do the statistics, and the channel sets and centring vectors chosen from them."""
    contract = Contract(activation=Activation(centering=centering), compensation=Compensation(Form.BLOCKS))

    def choose() -> list[Tensor]:
        shared = SiteStatistics(LAYER.hidden, 1, ring_rows=64)
        own = SiteStatistics(LAYER.inter, LAYER.experts, ring_rows=0)
        if seen:
            experts_forward(X, LAYER.prepare(), WEIGHTS, IDS, contract, w13_statistics=shared, w2_statistics=own)
        share = torch.full((LAYER.experts,), 0.25, dtype=torch.float64)
        state = refresh(
            {
                "w13": SiteInputs(shared, LAYER.gate, share, False),
                "w2": SiteInputs(own, LAYER.down, share, True),
            },
            contract,
        )
        return [t for name in ("w13", "w2") for t in (state.sites[name].center, state.sites[name].blocks)]

    assert_same(under, choose)


def test_quantize(under: Callable[..., list[Tensor]]) -> None:
    """So does a weight's quantization."""
    weight = activations(32, 64, seed=3)

    def quantize() -> list[Tensor]:
        p = PackedTensor.quantize(weight)
        return [p.codes, p.block_scales.view(torch.uint8), p.decode_scale, p.dequantize(), p.scaled()]

    assert_same(under, quantize)
