# SPDX-License-Identifier: Apache-2.0
"""Mismatch metrics: the formulas of verl and TRL, under padding, empty rows, infinities and low precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer_qat import mismatch
from trainer_qat.mismatch import importance_weights, measure
from vllm_quads.nvfp4 import QuadsError

log_probs = st.floats(-30.0, 0.0, allow_subnormal=False)
pairs = st.lists(st.tuples(log_probs, log_probs), min_size=1, max_size=20)
quick = settings(max_examples=60, deadline=None)


def tensors(values: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """Trainer and rollout log-probs [1, T]."""
    both = torch.tensor(values, dtype=torch.float64)
    return both[None, :, 0], both[None, :, 1]


@quick
@given(pairs)
def test_identities(values: list[tuple[float, float]]) -> None:
    """k3 >= 0, 0 < ESS <= 1, the estimators are their formulas, max >= p99 and mean, ppl ratio = e^k1."""
    t, r = tensors(values)
    report = measure(t, r)
    d = (t - r).flatten()
    assert report.tokens == len(values)
    assert report.sequences == 1
    assert report.k3 >= 0
    assert 0 < report.ess <= 1 + 1e-12
    assert report.k1 == pytest.approx(float(-d.mean()))
    assert report.k2 == pytest.approx(float((d * d).mean() / 2))
    assert report.max_gap == float(d.abs().max())
    assert report.max_gap >= report.p99_gap
    assert report.p99_gap == pytest.approx(float(d.abs().quantile(0.99)))
    assert report.max_gap + 1e-12 >= report.mean_gap
    assert report.ppl_ratio == pytest.approx(math.exp(report.k1), rel=1e-9)
    assert (report.training_log_ppl, report.rollout_log_ppl) == pytest.approx((float(-t.mean()), float(-r.mean())))
    assert report.log_ppl_diff == pytest.approx(report.k1)
    assert report.log_ppl_abs_diff == pytest.approx(abs(report.k1))
    assert report.chi2_seq == pytest.approx(math.exp(2 * float(d.sum())) - 1, rel=1e-6, abs=1e-9)
    w = d.exp()
    assert report.ess == pytest.approx(float(w.mean() ** 2 / (w**2).mean()), rel=1e-9)
    assert report.chi2 == pytest.approx(float((w**2).mean() - 1), rel=1e-9, abs=1e-9)


@quick
@given(st.lists(log_probs, min_size=1, max_size=20))
def test_identical_policies_have_no_mismatch(values: list[float]) -> None:
    """Equal log-probs: every gap is exactly 0, ESS and all weights exactly 1."""
    t = torch.tensor([values])
    report = measure(t, t.clone())
    assert (report.mean_gap, report.p99_gap, report.max_gap, report.k1, report.k2, report.k3) == (0,) * 6
    assert (report.ess, report.chi2, report.chi2_seq, report.ppl_ratio, report.infinite) == (1, 0, 0, 1, 0)
    for level in mismatch.LEVELS:
        for mode in mismatch.MODES:
            assert bool((importance_weights(t, t, level=level, mode=mode) == 1).all())


@quick
@given(st.lists(pairs, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([0.0, -50.0, math.nan, -math.inf]))
def test_padding_does_not_count(rows: list[list[tuple[float, float]]], extra: int, filler: float) -> None:
    """Any padding, with any value in it, left or right, gives the same report; rows without tokens are ignored."""
    width = max(map(len, rows)) + extra

    def padded(left: bool, fill: float) -> tuple[Tensor, Tensor, Tensor]:
        t, r = (torch.full((len(rows) + 1, width), fill, dtype=torch.float64) for _ in range(2))
        mask = torch.zeros(len(rows) + 1, width)
        for i, row in enumerate(rows):
            where = slice(width - len(row), width) if left else slice(0, len(row))
            t[i, where], r[i, where] = tensors(row)
            mask[i, where] = 1
        return t, r, mask

    a, b = measure(*padded(False, filler)), measure(*padded(True, -1.0))
    assert a.sequences == len(rows)
    for key, value in a.to_dict("").items():
        assert value == pytest.approx(b.to_dict("")[key], rel=1e-9, abs=1e-12), key
    weights = importance_weights(*padded(False, filler), level="sequence")
    assert bool((weights[padded(False, 0.0)[2] == 0] == 0).all())
    assert bool(torch.isfinite(weights).all())


def test_known_values() -> None:
    """Worked by hand: d = log 2 and log 1/2."""
    t, r = torch.tensor([[math.log(0.5), math.log(0.25)]]), torch.tensor([[math.log(0.25), math.log(0.5)]])
    report = measure(t, r)
    assert report.mean_gap == pytest.approx(math.log(2))
    assert report.k1 == pytest.approx(0, abs=1e-7)
    assert report.k3 == pytest.approx(0.25)
    assert report.k2 == pytest.approx(math.log(2) ** 2 / 2)
    assert report.ess == pytest.approx(1.25**2 / 2.125)
    assert report.chi2 == pytest.approx(1.125)
    assert report.training_ppl == pytest.approx(8**0.5)
    assert report.ppl_ratio == pytest.approx(1)


def test_estimators_agree_with_the_full_divergence() -> None:
    """On tokens drawn from the rollout, k1, k3 and mean full KL(rollout || trainer) estimate the same number."""
    torch.manual_seed(0)
    rollout = torch.log_softmax(torch.randn(200_000, 8), dim=-1)
    trainer = torch.log_softmax(rollout + 0.3 * torch.randn_like(rollout), dim=-1)
    token = torch.multinomial(rollout.exp(), 1)
    t, r = trainer.gather(1, token).T, rollout.gather(1, token).T
    exact = float(mismatch.full_kl(rollout, trainer).mean())
    assert float(mismatch.k1(t, r)) == pytest.approx(exact, rel=0.05)
    assert float(mismatch.k3(t, r)) == pytest.approx(exact, rel=0.02)
    assert float(importance_weights(t, r, upper=1e9).mean()) == pytest.approx(1.0, rel=0.01)


def test_full_kl() -> None:
    """Zero for equal distributions, infinite where q lacks what p has, p = 0 adds nothing."""
    p = torch.log(torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]))
    q = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]]))
    kl = mismatch.full_kl(p, q)
    assert float(kl[0]) == pytest.approx(0.5 * math.log(2))
    assert float(kl[1]) == math.inf
    assert mismatch.full_kl(p, p).tolist() == [0.0, 0.0]
    with pytest.raises(QuadsError, match="shapes"):
        mismatch.full_kl(p, q[:1])


def test_infinities_are_reported_as_such() -> None:
    """A token that one policy excludes has an infinite gap, not NaN; both excluding it agree; NaN stays NaN."""
    inf = -math.inf
    report = measure(torch.tensor([[inf, -1.0, inf]]), torch.tensor([[-2.0, -1.0, inf]]))
    assert (report.max_gap, report.mean_gap, report.k1, report.k3, report.infinite) == (math.inf,) * 4 + (1,)
    assert 0 < report.ess <= 1
    report = measure(torch.tensor([[-2.0, -1.0]]), torch.tensor([[inf, -1.0]]))
    assert (report.k3, report.k1, report.ess) == (math.inf, inf, 0.5)
    assert math.isnan(measure(torch.tensor([[math.nan, -1.0]]), torch.tensor([[-1.0, -1.0]])).max_gap)
    weights = importance_weights(torch.tensor([[inf, -1.0, inf]]), torch.tensor([[-2.0, -1.0, inf]]))
    assert weights.tolist() == [[0.0, 1.0, 1.0]]


def test_no_tokens_at_all() -> None:
    """An empty batch counts nothing and makes no number up."""
    report = measure(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    assert (report.tokens, report.sequences, report.infinite) == (0, 0, 0)
    assert math.isnan(report.mean_gap)
    assert math.isnan(report.max_gap)
    assert math.isnan(report.ess)
    assert bool((importance_weights(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)) == 0).all())


def test_low_precision_inputs_are_not_rounded_again() -> None:
    """BF16 log-probs give the metrics of the same values in float64."""
    torch.manual_seed(0)
    t, r = (-5 * torch.rand(4, 50)).to(torch.bfloat16), (-5 * torch.rand(4, 50)).to(torch.bfloat16)
    assert measure(t, r) == measure(t.double(), r.double())


def test_importance_weights_by_level_and_mode() -> None:
    """Token and sequence level, truncated and masked, with and without a lower bound, as TRL's four modes."""
    d = torch.tensor([[math.log(4.0), math.log(0.1), math.log(1.5)], [math.log(0.5), math.log(2.5), 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])

    def weights(**options: object) -> list[list[float]]:
        got = importance_weights(d, torch.zeros_like(d), mask, **options)  # type: ignore[arg-type]
        assert got.dtype == torch.float32
        return [[round(v, 5) for v in row] for row in got.tolist()]

    assert weights(upper=2.0) == [[2, 0.1, 1.5], [0.5, 2, 0]]
    assert weights(upper=2.0, lower=0.2) == [[2, 0.2, 1.5], [0.5, 2, 0]]
    assert weights(upper=2.0, mode="mask") == [[0, 0.1, 1.5], [0.5, 0, 0]]
    assert weights(upper=2.0, lower=0.2, mode="mask") == [[0, 0, 1.5], [0.5, 0, 0]]
    assert weights(upper=1.0, level="sequence") == [[0.6, 0.6, 0.6], [1, 1, 0]]
    assert weights(upper=1.0, level="sequence", mode="mask") == [[0.6, 0.6, 0.6], [0, 0, 0]]


def test_metrics_of_the_weights() -> None:
    """verl's `rollout_is_*`, worked by hand: statistics of the weights as applied, fractions of the raw ratios."""
    d = torch.tensor([[math.log(4.0), math.log(0.1), math.log(1.5)], [math.log(0.6), math.log(2.5), 9.0]])
    zeros, mask = torch.zeros_like(d), torch.tensor([[1, 1, 1], [1, 1, 0]])
    got = mismatch.weight_metrics(d, zeros, mask, upper=2.0, prefix="a/")
    w = torch.tensor([2, 0.1, 1.5, 0.6, 2])
    expected = {"mean": w.mean(), "max": 2, "min": 0.1, "std": w.std(correction=0)}
    expected |= {
        "eff_sample_size": w.mean() ** 2 / (w**2).mean(),
        "ratio_fraction_high": 0.4,
        "ratio_fraction_low": 0.2,
    }
    assert got == pytest.approx({f"a/rollout_is_{k}": float(v) for k, v in expected.items()}, rel=1e-6)
    got = mismatch.weight_metrics(d, zeros, mask, upper=1.0, lower=0.7, level="sequence", mode="mask")
    assert got["rollout_is_mean"] == 0.0  # products 0.6 and 1.5, both outside
    assert (got["rollout_is_ratio_fraction_high"], got["rollout_is_ratio_fraction_low"]) == (0.5, 0.5)
    assert math.isnan(mismatch.weight_metrics(d, zeros, mask * 0)["rollout_is_max"])


def test_bad_arguments_are_named() -> None:
    """Shapes that differ, unknown levels and crossed bounds are errors that say so."""
    a = torch.zeros(2, 3)
    with pytest.raises(QuadsError, match="need one shape"):
        measure(a, a[:1])
    with pytest.raises(QuadsError, match="level='word'"):
        importance_weights(a, a, level="word")
    with pytest.raises(QuadsError, match="lower=3"):
        importance_weights(a, a, lower=3.0)


def test_dictionary_for_loggers() -> None:
    """Flat float dictionary under a prefix, with the names of verl and TRL."""
    logged = measure(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).to_dict("gap/")
    assert logged["gap/sampling_logp_difference/max"] == 0.5
    assert logged["gap/kl"] == -0.5
    assert {"gap/k3_kl", "gap/eff_sample_size", "gap/ppl_ratio", "gap/training_ppl"} <= logged.keys()
    assert all(isinstance(v, float) for v in logged.values())


def test_temperature() -> None:
    """at_temperature scales raw log-probs as the sampler did."""
    logits = torch.randn(3, 7)
    expected = torch.log_softmax(logits / 0.7, dim=-1)
    torch.testing.assert_close(mismatch.at_temperature(torch.log_softmax(logits, dim=-1), 0.7), expected)


def test_log_probs_of_sampled_tokens() -> None:
    """selective_log_softmax: float32 log-probs from BF16 logits, at the sampler's temperature, with gradients."""
    torch.manual_seed(0)
    logits, ids = (5 * torch.randn(2, 3, 7)).to(torch.bfloat16), torch.randint(0, 7, (2, 3))
    got = mismatch.selective_log_softmax(logits, ids, 0.7)
    exact = torch.log_softmax(logits.double() / 0.7, dim=-1).gather(-1, ids[..., None])[..., 0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(mismatch.selective_log_softmax(logits[0], ids[0], 0.7), got[0])
    assert mismatch.selective_log_softmax(logits[:0], ids[:0]).shape == (0, 3)
    leaf = logits.float().requires_grad_()
    mismatch.selective_log_softmax(leaf, ids).sum().backward()
    assert float(leaf.grad.sum()) == pytest.approx(0.0, abs=1e-4)
    with pytest.raises(QuadsError, match="do not fit"):
        mismatch.selective_log_softmax(logits, ids[:1])
    with pytest.raises(QuadsError, match="temperature is 0"):
        mismatch.selective_log_softmax(logits, ids, 0.0)


def test_formulas_of_verl_on_a_padded_batch() -> None:
    """Every metric equals verl's expression (masked sums over a padded batch), written out from its source."""
    torch.manual_seed(1)
    old, rollout = (-3 * torch.rand(5, 9, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(9) < torch.tensor([[9], [1], [4], [7], [2]])).double()

    def mean(x: Tensor, axis: int | None = None) -> Tensor:
        return (x * mask).sum(axis) / mask.sum(axis)

    ratio = old - rollout
    difference = mean(rollout, -1) - mean(old, -1)
    expected = {
        "kl": mean(rollout - old),
        "k3_kl": mean(ratio.exp() - ratio - 1),
        "training_ppl": mean(-old, -1).exp().mean(),
        "rollout_ppl": mean(-rollout, -1).exp().mean(),
        "training_log_ppl": mean(-old, -1).mean(),
        "rollout_log_ppl": mean(-rollout, -1).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": mean((2 * ratio).exp()) - 1,
        "chi2_seq": (2 * (ratio * mask).sum(-1)).exp().mean() - 1,
        "sampling_logp_difference/mean": mean(ratio.abs()),
        "sampling_logp_difference/max": (ratio.abs() * mask).max(),
    }
    got = measure(old, rollout, mask).to_dict("")
    for key, value in expected.items():
        assert got[key] == pytest.approx(float(value), rel=1e-9), key
