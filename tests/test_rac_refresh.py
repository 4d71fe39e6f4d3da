# SPDX-License-Identifier: Apache-2.0
"""From statistics to the next state, end to end: gather in the forward, refresh, serve with it."""

from __future__ import annotations

import functools

import pytest
import torch
from rac_data import Layer, activations, routing
from torch import Tensor
from torch.nn.functional import silu

from vllm_quads.compensation import (
    CompensationState,
    SiteInputs,
    SiteStatistics,
    experts_forward,
    refresh,
)
from vllm_quads.nvfp4 import (
    Activation,
    Allocation,
    BlockScaleRule,
    Centering,
    Compensation,
    Contract,
    ContractError,
    Form,
    PackedTensor,
    Scheme,
    quantize_activation,
)

LAYER, TOP_K = Layer(hidden=256, inter=128), 3
SENSITIVITIES = {"w13": 2.0, "w2": 1.0}


def contract(centering: Centering = Centering.MEDIAN, **options: object) -> Contract:
    return Contract(
        activation=Activation(centering=centering),
        compensation=Compensation(**{"form": Form.BLOCKS, **options}),  # type: ignore[arg-type]
    )


def tokens(seed: int) -> Tensor:
    """Activations whose outlier channels are the same for every seed."""
    return activations(400, LAYER.hidden)[torch.randperm(400, generator=torch.Generator().manual_seed(seed))[:200]]


def forward(
    x: Tensor, contract: Contract, state: CompensationState | None = None, **statistics: SiteStatistics
) -> Tensor:
    sites = state.sites if state is not None else {}
    w13, w2 = sites.get("w13"), sites.get("w2")
    weights, ids = routing(x.shape[0], LAYER.experts, TOP_K)
    return experts_forward(x, LAYER.prepare(w13, w2), weights, ids, contract, w13_site=w13, **statistics)


@functools.cache
def exact(seed: int) -> Tensor:
    """What the layer computes of `tokens(seed)` with quantized weights and exact activations, float64."""
    x = tokens(seed).to(torch.float64)
    weights, ids = routing(x.shape[0], LAYER.experts, TOP_K)
    y = torch.zeros_like(x)
    for e in range(LAYER.experts):
        gate, up, down = LAYER.dense(e)
        weight = (weights * (ids == e)).sum(dim=1, keepdim=True)
        y += weight * ((silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return y


def gathered() -> dict[str, SiteInputs]:
    w13 = SiteStatistics(LAYER.hidden, ring_rows=128)
    w2 = SiteStatistics(LAYER.inter, LAYER.experts)
    forward(tokens(0), contract(Centering.NONE, form=Form.NONE), w13_statistics=w13, w2_statistics=w2)
    share = w2.tokens.to(torch.float64) / w13.tokens
    gate_up = PackedTensor(
        torch.cat((LAYER.gate.codes, LAYER.up.codes)),
        torch.cat((LAYER.gate.block_scales.view(torch.uint8), LAYER.up.block_scales.view(torch.uint8))).view(
            torch.float8_e4m3fn
        ),
        LAYER.w13[2].T.flatten().contiguous(),
    )
    return {"w13": SiteInputs(w13, gate_up, share.repeat(2), False), "w2": SiteInputs(w2, LAYER.down, share, True)}


def output_error(seed: int, contract: Contract, state: CompensationState | None) -> float:
    return float((forward(tokens(seed), contract, state) - exact(seed)).square().mean())


def test_forward_gathers_what_it_quantizes() -> None:
    """The forward counts each token once for w13 and once per routed expert for w2, with that operand's error."""
    sites = gathered()
    assert sites["w13"].statistics.tokens.tolist() == [200]
    _, ids = routing(200, LAYER.experts, TOP_K)
    counts = torch.bincount(ids.flatten(), minlength=LAYER.experts)
    assert torch.equal(sites["w2"].statistics.tokens, counts)
    x = tokens(0)
    error = x - quantize_activation(x, rule=BlockScaleRule.FOUR_OVER_SIX).dequantize()
    want = error.to(torch.float64).square().mean(dim=0)
    torch.testing.assert_close(sites["w13"].statistics.mean_energy()[0], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("centering", list(Centering))
@pytest.mark.parametrize("allocation", list(Allocation))
def test_refresh_reduces_the_error_of_new_tokens(centering: Centering, allocation: Allocation) -> None:
    """Refreshed sets and centring halve the layer's output error on other tokens, within the budget."""
    chosen_by = contract(centering, ratio=0.5, allocation=allocation)
    sites = gathered()
    state = refresh(sites, chosen_by, SENSITIVITIES)
    plain = output_error(1, contract(Centering.NONE, form=Form.NONE), None)
    assert output_error(1, chosen_by, state) < 0.5 * plain

    assert dict(state.sensitivities) == SENSITIVITIES
    assert state.sites["w13"].center.any() == (centering is not Centering.NONE)
    assert not state.sites["w2"].center.any()  # every expert has its own input: nothing to centre on
    assert state.sites["w13"].blocks.shape == (1, 16)
    assert state.sites["w2"].blocks.shape == (LAYER.experts, 8)
    share = sites["w2"].share
    cost = {"w13": 2 * LAYER.inter * share.sum()[None], "w2": LAYER.hidden * share}
    spent = sum(float((state.sites[n].blocks.sum(dim=1) * c).sum()) for n, c in cost.items())
    total = sum(float(c.sum()) * state.sites[n].blocks.shape[1] for n, c in cost.items())
    assert spent <= 0.5 * total * (1 + 1e-6)
    assert spent > 0.4 * total


def test_centring_alone_already_helps() -> None:
    """With offsets in the channels, the median of the ring cuts the error with no block at all."""
    plain, centered = contract(Centering.NONE, form=Form.NONE), contract(Centering.MEDIAN, form=Form.NONE)
    state = refresh(gathered(), centered)
    assert not any(s.blocks.any() for s in state.sites.values())
    assert output_error(1, centered, state) < output_error(1, plain, None)


def test_without_sensitivities_the_ratio_is_uniform() -> None:
    """A budget without gradients would be a worse guide than the uniform ratio, so that is what is used."""
    budget = refresh(gathered(), contract(allocation=Allocation.BUDGET))
    uniform = refresh(gathered(), contract(allocation=Allocation.UNIFORM), SENSITIVITIES)
    for name in ("w13", "w2"):
        assert torch.equal(budget.sites[name].blocks, uniform.sites[name].blocks)
    assert budget.sites["w13"].blocks.sum(dim=1).tolist() == [4]
    assert budget.sites["w2"].blocks.sum(dim=1).tolist() == [2] * LAYER.experts


@pytest.mark.parametrize("form", [Form.ROWS, Form.NONE])
def test_forms_without_blocks_choose_none(form: Form) -> None:
    """ROWS and NONE never append, so their state holds centring only; W4A16 neither."""
    for c in (contract(form=form), Contract(scheme=Scheme.W4A16)):
        state = refresh(gathered(), c, SENSITIVITIES)
        assert not any(s.blocks.any() for s in state.sites.values())


def test_partial_sensitivities_are_refused() -> None:
    """Sensitivities for some sites but not for all: the first missing one is named."""
    with pytest.raises(ContractError, match="^w2: has no sensitivity"):
        refresh(gathered(), contract(), {"w13": 1.0})


def test_refresh_is_reproducible() -> None:
    """The same statistics give the same state, bit for bit."""
    first, second = (refresh(gathered(), contract(), SENSITIVITIES) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
