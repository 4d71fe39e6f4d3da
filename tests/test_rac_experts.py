# SPDX-License-Identifier: Apache-2.0
"""The MoE forward against a float64 loop over tokens and experts, and its edges: routing, empty steps, bad tokens."""

from __future__ import annotations

import pytest
import torch
from rac_data import Layer, activations, random_site, routing
from torch import Tensor
from torch.nn.functional import silu

from vllm_quads.compensation import (
    SiteState,
    SiteStatistics,
    experts_forward,
    linear_forward,
    prepare_matrix,
    quantize_with_residual,
)
from vllm_quads.nvfp4 import Activation, BlockScaleRule, Centering, Compensation, Contract, Form, FormatError, Scheme

LAYER, M, TOP_K = Layer(), 12, 3
FORMS = list(Form)


def contract(form: Form, rule: BlockScaleRule = BlockScaleRule.FOUR_OVER_SIX) -> Contract:
    return Contract(activation=Activation(block_scale_rule=rule), compensation=Compensation(form))


def operand(
    x: Tensor, form: Form, decode: bool, blocks: Tensor, rule: BlockScaleRule, **scale: Tensor | None
) -> Tensor:
    """Dequantized, compensated operand float64 [K] of one token x [K]."""
    c = quantize_with_residual(x[None], rule=rule, **scale)
    full = form is Form.ROWS or (form is Form.AUTO and decode)
    keep = torch.ones(len(x)) if full else blocks.repeat_interleave(16) * float(form in (Form.BLOCKS, Form.AUTO))
    return (c.main.dequantize().to(torch.float64) + c.residual.dequantize().to(torch.float64) * keep)[0]


def loop(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    form: Form | None,
    w13: SiteState,
    w2: SiteState,
    *,
    rule: BlockScaleRule = BlockScaleRule.FOUR_OVER_SIX,
    decode: Tensor | None = None,
    g13: Tensor | None = None,
    g2: Tensor | None = None,
) -> Tensor:
    """The layer one token and one expert at a time, GEMMs in float64; form None is W4A16. Output float64 [M, H]."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        is_decode = decode is not None and bool(decode[t])
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if expert < 0:
                continue
            gate, up, down = LAYER.dense(expert)
            inputs = x[t].to(torch.float64)
            if form is not None:
                inputs = operand(x[t], form, is_decode, w13.blocks[0], rule, g=g13, center=w13.center) + w13.center
            gated = (silu((gate @ inputs).float()) * (up @ inputs).float()).to(x.dtype)
            inner = gated.to(torch.float64)
            if form is not None:
                g = None if g2 is None else g2[expert]
                inner = operand(gated, form, is_decode, w2.blocks[expert], rule, g=g)
            y[t] += weight * (down @ inner)
    return y


def assert_layer(y: Tensor, want: Tensor) -> None:
    """Equal up to one rounding to y's dtype and float32 summation."""
    noise = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    assert (y.to(torch.float64) - want).abs().le(noise * want.abs() + 2e-5 * want.square().mean().sqrt()).all()


def sites() -> tuple[SiteState, SiteState]:
    return random_site(LAYER.hidden, centered=True), random_site(LAYER.inter, LAYER.experts, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", list(BlockScaleRule))
@pytest.mark.parametrize("form", [None, *FORMS], ids=lambda f: "w4a16" if f is None else f.value)
def test_forward_equals_a_loop(form: Form | None, rule: BlockScaleRule, dtype: torch.dtype) -> None:
    """W4A16 and every form of W4A4: quantization, gate/up scales, centring bias, SiLU and routing equal the loop's."""
    x, (w13, w2) = activations(M, LAYER.hidden, dtype=dtype), sites()
    weights, ids = routing(M, LAYER.experts, TOP_K)
    decode = torch.arange(M) % 2 == 0
    c = Contract(scheme=Scheme.W4A16) if form is None else contract(form, rule)
    y = experts_forward(x, LAYER.prepare(w13, w2), weights, ids, c, w13_site=w13, decode=decode)
    assert y.dtype == dtype
    assert_layer(y, loop(x, weights, ids, form, w13, w2, rule=rule, decode=decode))


@pytest.mark.parametrize("form", [Form.NONE, Form.AUTO])
def test_static_scales_are_per_site_and_expert(form: Form) -> None:
    """One static scale for w13's input and one per expert for w2's, used for main and residual alike."""
    x, (w13, w2) = activations(M, LAYER.hidden), sites()
    weights, ids = routing(M, LAYER.experts, TOP_K)
    g13, g2 = torch.tensor(21.0), torch.linspace(20.0, 400.0, LAYER.experts)
    y = experts_forward(x, LAYER.prepare(w13, w2), weights, ids, contract(form), w13_site=w13, g13=g13, g2=g2)
    assert_layer(y, loop(x, weights, ids, form, w13, w2, g13=g13, g2=g2))


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_live_elsewhere(form: Form) -> None:
    """Negative ids contribute nothing: local parts add up to the whole, and a token of nobody's is zero."""
    x, (w13, w2) = activations(M, LAYER.hidden), sites()
    weights, ids = routing(M, LAYER.experts, TOP_K)
    prepared = LAYER.prepare(w13, w2)
    parts = []
    for local in (ids < 2, ids >= 2):
        here = torch.where(local, ids, -1)
        parts.append(experts_forward(x, prepared, weights, here, contract(form), w13_site=w13))
        assert_layer(parts[-1], loop(x, weights, here, form, w13, w2))
    whole = experts_forward(x, prepared, weights, ids, contract(form), w13_site=w13)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
    nobody = experts_forward(x, prepared, weights, torch.full_like(ids, -1), contract(form), w13_site=w13)
    assert torch.equal(nobody, torch.zeros_like(x))


@pytest.mark.parametrize("form", FORMS)
def test_repeated_experts_of_a_token(form: Form) -> None:
    """A token routed twice to one expert (simulated routing does that) gets it twice, and no other token's row."""
    x, (w13, w2) = activations(4, LAYER.hidden), sites()
    weights = torch.tensor([[0.5, 0.2]] * 4)
    ids = torch.tensor([[0, 0], [0, 0], [3, 3], [5, -1]])
    y = experts_forward(x, LAYER.prepare(w13, w2), weights, ids, contract(form), w13_site=w13)
    assert_layer(y, loop(x, weights, ids, form, w13, w2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("static", [False, True])
def test_no_tokens(form: Form, static: bool) -> None:
    """An empty step gives an empty output in every form and leaves the statistics alone."""
    x, (w13, w2) = activations(M, LAYER.hidden, dtype=torch.bfloat16)[:0], sites()
    shared, own = SiteStatistics(LAYER.hidden, ring_rows=8), SiteStatistics(LAYER.inter, LAYER.experts)
    y = experts_forward(
        x,
        LAYER.prepare(w13, w2),
        torch.zeros(0, TOP_K),
        torch.zeros(0, TOP_K, dtype=torch.int32),
        contract(form),
        w13_site=w13,
        g13=torch.tensor(9.0) if static else None,
        g2=torch.full((LAYER.experts,), 9.0) if static else None,
        decode=torch.zeros(0, dtype=torch.bool),
        w13_statistics=shared,
        w2_statistics=own,
    )
    assert y.shape == (0, LAYER.hidden)
    assert y.dtype == torch.bfloat16
    assert not shared.tokens.any()
    assert not own.tokens.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("form", [None, *FORMS], ids=lambda f: "w4a16" if f is None else f.value)
def test_a_bad_token_stays_alone(form: Form | None, static: bool, bad: float) -> None:
    """NaN or Inf in one token's activations: nothing finite comes out for it; others' bits and counts stay."""
    weights, ids = routing(M, LAYER.experts, TOP_K)
    w13, w2 = sites()
    c = Contract(scheme=Scheme.W4A16) if form is None else contract(form)
    scales = {"g13": torch.tensor(21.0), "g2": torch.full((LAYER.experts,), 99.0)} if static else {}
    others = torch.arange(M) != 5

    def run(x: Tensor) -> tuple[Tensor, SiteStatistics, SiteStatistics]:
        shared, own = SiteStatistics(LAYER.hidden, ring_rows=32), SiteStatistics(LAYER.inter, LAYER.experts)
        y = experts_forward(
            x,
            LAYER.prepare(w13, w2),
            weights,
            ids,
            c,
            w13_site=w13,
            decode=torch.arange(M) % 2 == 0,
            w13_statistics=shared,
            w2_statistics=own,
            **scales,
        )
        return y, shared, own

    x = activations(M, LAYER.hidden)
    good, *_ = run(x)
    x[5, 20] = bad
    y, shared, own = run(x)
    assert not y[5].isfinite().any()
    if form is not None or bad != bad:
        assert y[5].isnan().all()
    assert torch.equal(y[others], good[others])
    if form is not None:
        assert int(shared.tokens[0]) == M - 1
        assert int(own.tokens.sum()) == TOP_K * (M - 1)
        assert shared.energy.isfinite().all()
        assert own.energy.isfinite().all()
        assert shared.ring.isfinite().all()


def test_a_token_does_not_depend_on_its_batch() -> None:
    """In AUTO a decode token's output is the same alone and among prefill tokens, up to float32 summation order."""
    x, (w13, w2) = activations(M, LAYER.hidden), sites()
    weights, ids = routing(M, LAYER.experts, TOP_K)
    decode = torch.arange(M) % 3 == 0
    prepared = LAYER.prepare(w13, w2)
    together = experts_forward(x, prepared, weights, ids, contract(Form.AUTO), w13_site=w13, decode=decode)
    for t in range(M):
        one = slice(t, t + 1)
        alone = experts_forward(
            x[one], prepared, weights[one], ids[one], contract(Form.AUTO), w13_site=w13, decode=decode[one]
        )
        torch.testing.assert_close(alone[0], together[t], rtol=1e-5, atol=1e-5 * float(together.abs().max()))


@pytest.mark.parametrize(
    "options",
    [
        {"compensation": {"form": "none"}},
        {"compensation": {"form": "blocks", "ratio": 0.0}},
        {"activation": {"centering": "none"}},
        {"compensation": {"form": "none"}, "activation": {"centering": "none"}},
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_the_contract_has_the_last_word_over_the_state(options: dict[str, dict[str, object]], dense: bool) -> None:
    """Blocks or centring of a loaded state that the contract switches off are left out, as if they were not there."""
    x, (w13, w2) = activations(M, LAYER.hidden), sites()
    c = contract(Form.BLOCKS).merged(options)
    blocks_off = c.compensation.form is Form.NONE or not c.compensation.ratio
    center_off = c.activation.centering is Centering.NONE
    w13_left = SiteState(w13.center * (not center_off), w13.blocks & (not blocks_off))
    w2_left = SiteState(w2.center, w2.blocks & (not blocks_off))

    def run(w13: SiteState, w2: SiteState, c: Contract) -> Tensor:
        if dense:
            weight = LAYER.gate.scaled()[0]
            matrix = prepare_matrix(weight, torch.ones(LAYER.inter), w13.blocks[0], w13.center)
            return linear_forward(x, matrix, c, site=w13)
        return experts_forward(x, LAYER.prepare(w13, w2), *routing(M, LAYER.experts, TOP_K), c, w13_site=w13)

    assert torch.equal(run(w13, w2, c), run(w13_left, w2_left, c))
    assert not torch.equal(run(w13, w2, c), run(w13, w2, contract(Form.BLOCKS)))


def test_mistaken_shapes_are_refused() -> None:
    """An expert id beyond the local experts, and a w2 site for another number of experts, are errors that say so."""
    x, (w13, w2) = activations(2, LAYER.hidden), sites()
    ids = torch.tensor([[0, 1], [LAYER.experts, 2]])
    with pytest.raises(FormatError, match="names local expert 6, but there are 6"):
        experts_forward(x, LAYER.prepare(w13, w2), torch.ones(2, 2), ids, contract(Form.ROWS), w13_site=w13)
    with pytest.raises(FormatError, match="blocks for 5 experts, but 6 experts are prepared"):
        LAYER.prepare(w13, SiteState(w2.center, w2.blocks[:5]))
