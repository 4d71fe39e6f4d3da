# SPDX-License-Identifier: Apache-2.0
"""Which blocks are compensated: scores, a uniform ratio, one budget over all sites."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from rac_data import activations, packed
from torch import Tensor

from vllm_quads.compensation import SiteScore, SiteStatistics, quantize_with_residual, select_budget, select_uniform
from vllm_quads.compensation.forms import columns_of
from vllm_quads.compensation.linear import quantization_error
from vllm_quads.compensation.selection import column_energy, expert_site_score, shared_site_score
from vllm_quads.nvfp4 import ContractError


def score(*values: list[float], cost: list[float] | None = None) -> SiteScore:
    value = torch.tensor(values, dtype=torch.float64)
    return SiteScore(value, torch.tensor(cost or [1.0] * len(values), dtype=torch.float64))


def macs(scores: dict[str, SiteScore], chosen: dict[str, Tensor]) -> float:
    return float(sum((chosen[n].sum(dim=1) * s.cost).sum() for n, s in scores.items()))


def test_column_energy_is_that_of_the_dequantized_weight() -> None:
    """column_energy[e, k] is the sum over N of W[e, n, k]^2 in float64."""
    weight = packed(3, 24, 48)
    want = weight.dequantize().to(torch.float64).square().sum(dim=1)
    torch.testing.assert_close(column_energy(weight), want)


def test_score_is_the_output_error_that_a_block_causes() -> None:
    """Scores equal the routed output error of each block's residual per token, costs are MACs per token.

    Channels' errors are uncorrelated, so the error of an output is the sum of energy times squared weight.
    """
    gen = torch.Generator().manual_seed(0)
    e, n, k = 3, 24, 48
    weight, share = packed(e, n, k), torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    dense = weight.dequantize().to(torch.float64)
    shared, own = (torch.rand(g, k, generator=gen, dtype=torch.float64) for g in (1, e))
    want_shared, want_own = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(e, 3, dtype=torch.float64)
    for i, b, c in itertools.product(range(e), range(3), range(16)):
        squares = dense[i, :, 16 * b + c].square().sum()
        want_shared[0, b] += share[i] * shared[0, 16 * b + c] * squares
        want_own[i, b] += share[i] * own[i, 16 * b + c] * squares
    got = shared_site_score(shared, column_energy(weight), n, share)
    torch.testing.assert_close(got.value, want_shared)
    assert got.cost.tolist() == [16 * n * 1.75]
    got = expert_site_score(own, column_energy(weight), n, share)
    torch.testing.assert_close(got.value, want_own)
    assert got.cost.tolist() == [16 * n * 0.5, 16 * n * 1.0, 16 * n * 0.25]


@pytest.mark.parametrize(
    ("ratio", "count"), [(0.0, 0), (0.01, 1), (0.1, 1), (0.25, 2), (0.5, 4), (0.69, 6), (0.99, 8), (1.0, 8)]
)
def test_uniform_takes_the_best_blocks_of_every_group(ratio: float, count: int) -> None:
    """Every group of every site gets its best blocks: the number nearest to the ratio, but at least one."""
    gen = torch.Generator().manual_seed(0)
    shared, own = torch.rand(8, generator=gen).tolist(), torch.rand(5, 8, generator=gen).tolist()
    scores = {"w13": score(shared), "w2": score(*own)}
    chosen = select_uniform(scores, ratio)
    assert list(chosen) == list(scores)
    for name, mask in chosen.items():
        assert mask.dtype == torch.bool
        assert mask.sum(dim=1).tolist() == [count] * mask.shape[0]
        for values, taken in zip(scores[name].value, mask, strict=True):
            if 0 < count < 8:
                assert values[taken].min() > values[~taken].max()


def test_equal_blocks_are_taken_in_order() -> None:
    """Ties go to the first block, so that every device chooses the same set; also for experts that saw no token."""
    chosen = select_uniform({"w2": score([0.0] * 8, [3, 1, 3, 3, 1, 1, 1, 1])}, 0.25)
    assert chosen["w2"].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 2]]
    chosen = select_budget({"w2": score([1.0] * 40)}, {"w2": 1.0}, 0.25)
    assert chosen["w2"].nonzero()[:, 1].tolist() == list(range(10))


def random_scores(seed: int) -> tuple[dict[str, SiteScore], dict[str, float]]:
    gen = torch.Generator().manual_seed(seed)
    cost = torch.rand(4, generator=gen).add(0.2).tolist()
    scores = {
        "a": score(torch.rand(3, generator=gen).tolist(), cost=[3 * cost[0]]),
        "b": score(*torch.rand(3, 3, generator=gen).tolist(), cost=cost[1:]),
    }
    return scores, {"a": 0.7, "b": 1.6}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.6])
def test_budget_is_kept_and_nearly_optimal(seed: int, ratio: float) -> None:
    """MACs stay within the ratio, nothing that fits is left out, the gain is within one block of the best of 2^12."""
    scores, weight = random_scores(seed)
    total = sum(float(s.cost.sum()) * s.value.shape[1] for s in scores.values())
    chosen = select_budget(scores, weight, ratio)
    assert macs(scores, chosen) <= ratio * total * (1 + 1e-6)

    gains = torch.cat([weight[n] * s.value.flatten() for n, s in scores.items()])
    costs = torch.cat([s.cost[:, None].expand_as(s.value).flatten() for s in scores.values()])
    taken = torch.cat([m.flatten() for m in chosen.values()])
    left = ratio * total - float(costs[taken].sum())
    assert not (costs[~taken] < left * (1 - 1e-6)).any()
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=12)), dtype=torch.float64)
    best = (choices @ gains)[choices @ costs <= ratio * total].max()
    assert gains[taken].sum() >= best - gains.max()


@pytest.mark.parametrize("seed", range(5))
def test_budget_is_optimal_where_blocks_cost_the_same(seed: int) -> None:
    """With equal costs the budget buys exactly the blocks with the largest sensitivity times output error."""
    values = torch.rand(2, 10, generator=torch.Generator().manual_seed(seed)).tolist()
    scores = {"a": score(values[0]), "b": score(values[1])}
    chosen = select_budget(scores, {"a": 1.0, "b": 3.0}, 0.3)
    gains = torch.tensor([*values[0], *(3.0 * v for v in values[1])])
    taken = torch.cat([chosen["a"][0], chosen["b"][0]])
    assert taken.sum() == 6
    assert torch.equal(taken.nonzero().flatten(), gains.topk(6).indices.sort().values)


def test_budget_of_nothing_and_everything() -> None:
    """Ratio 0 selects nothing; ratio 1 every block that carries error, however the costs add up in floating point."""
    scores, weight = random_scores(0)
    assert not any(m.any() for m in select_budget(scores, weight, 0.0).values())
    assert all(m.all() for m in select_budget(scores, weight, 1.0).values())


def test_budget_goes_to_the_sensitive_site() -> None:
    """A site with ten times the sensitivity gets its blocks first."""
    scores = {"first": score([1.0] * 8), "last": score([1.0] * 8)}
    chosen = select_budget(scores, {"first": 1.0, "last": 10.0}, 0.5)
    assert chosen["last"].all()
    assert not chosen["first"].any()


def test_experts_without_traffic_are_never_bought() -> None:
    """An expert that no token was routed to costs nothing and gains nothing: no block of it, even at ratio 1."""
    scores = {"w2": score([5.0, 5.0], [0.0, 0.0], cost=[1.0, 0.0])}
    assert select_budget(scores, {"w2": 1.0}, 1.0)["w2"].tolist() == [[True, True], [False, False]]


def test_sensitivities_must_be_complete_and_sensible() -> None:
    """A site without a sensitivity is named, as is one whose sensitivity is negative, NaN or infinite."""
    scores = {"b": score([1.0]), "a": score([1.0])}
    with pytest.raises(ContractError, match=r"^a: has no sensitivity.*allocation='uniform'"):
        select_budget(scores, {"b": 1.0}, 0.5)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ContractError, match=r"^b: sensitivity is"):
            select_budget(scores, {"a": 1.0, "b": bad}, 0.5)


def test_only_whole_blocks_are_appended() -> None:
    """The channels of a block mask are complete runs of 16, in ascending order."""
    blocks = torch.tensor([False, True, False, True, True])
    assert columns_of(blocks).tolist() == [*range(16, 32), *range(48, 80)]
    assert columns_of(~blocks | blocks).tolist() == list(range(80))
    assert columns_of(blocks & ~blocks).numel() == 0


def test_chosen_blocks_beat_random_blocks() -> None:
    """With outlier channels, a quarter of the blocks removes more error on new tokens if chosen than at random."""
    k, n, ratio = 512, 64, 0.25
    weight = packed(1, n, k)
    dense = weight.dequantize()[0].to(torch.float64)
    x = activations(256, k)
    statistics = SiteStatistics(k)
    statistics.update(x, quantization_error(x, quantize_with_residual(x), None))
    share = torch.ones(1, dtype=torch.float64)
    scores = {"s": shared_site_score(statistics.mean_energy(), column_energy(weight), n, share)}

    held_out = activations(512, k)[256:]  # same channels, new tokens
    c = quantize_with_residual(held_out)
    main, residual = c.main.dequantize().to(torch.float64), c.residual.dequantize().to(torch.float64)

    def output_error(blocks: Tensor) -> float:
        operand = main + residual * blocks.repeat_interleave(16)
        return float(((operand - held_out) @ dense.T).square().mean())

    chosen = output_error(select_uniform(scores, ratio)["s"][0])
    gen = torch.Generator().manual_seed(0)
    by_chance = [output_error(torch.randperm(k // 16, generator=gen) < k // 64) for _ in range(20)]
    nothing = output_error(torch.zeros(k // 16, dtype=torch.bool))
    assert chosen < min(by_chance)
    assert nothing - chosen > 1.5 * (nothing - sum(by_chance) / 20)
