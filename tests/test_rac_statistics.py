# SPDX-License-Identifier: Apache-2.0
"""Error statistics: what they sum up, which rows they keep, and that they can live inside a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch
from rac_data import activations
from torch import Tensor

from vllm_quads.compensation import SiteStatistics, quantize_with_residual
from vllm_quads.compensation.linear import quantization_error
from vllm_quads.nvfp4 import BlockScaleRule, Centering, FormatError, quantize_activation

K, RING = 32, 8


def fed(steps: list[Tensor], ring: int = RING) -> SiteStatistics:
    """Statistics after several steps whose residual is the input itself (easy to recompute)."""
    statistics = SiteStatistics(K, ring_rows=ring)
    for x in steps:
        statistics.update(x, x)
    return statistics


def rows(m: int, seed: int = 0) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(torch.float32)


def sorted_rows(x: Tensor) -> list[list[float]]:
    return sorted(x.to(torch.float32).tolist())


def test_energy_is_the_mean_squared_residual() -> None:
    """Shared site: tokens and mean energy over many steps equal a float64 recomputation from all rows at once."""
    x = activations(500, K)
    error = quantization_error(x, quantize_with_residual(x), None)
    statistics = SiteStatistics(K)
    for part, e in zip(x.split(37), error.split(37), strict=True):
        statistics.update(part, e)
    assert statistics.tokens.tolist() == [500]
    want = error.to(torch.float64).square().mean(dim=0, keepdim=True)
    torch.testing.assert_close(statistics.mean_energy(), want, rtol=1e-6, atol=0)


def test_energy_is_kept_per_group() -> None:
    """Per-expert site: each group's mean is over its own rows; a group without rows has zero energy and no tokens."""
    residual, group = rows(300), torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(0))
    group[group == 2] = 3
    statistics = SiteStatistics(K, 4)
    for part, g in zip(residual.split(41), group.split(41), strict=True):
        statistics.update(part, part, g)
    assert statistics.tokens.tolist() == torch.bincount(group, minlength=4).tolist()
    for g in (0, 1, 3):
        want = residual[group == g].to(torch.float64).square().mean(dim=0)
        torch.testing.assert_close(statistics.mean_energy()[g], want, rtol=1e-6, atol=0)
    assert not statistics.mean_energy()[2].any()


@pytest.mark.parametrize("sizes", [[3], [8], [3, 4], [5, 5], [8, 8, 1], [20], [3, 20, 2], [0, 6, 0, 6], [1] * 19])
def test_ring_keeps_the_latest_rows(sizes: list[int]) -> None:
    """Whatever the step sizes, the ring holds exactly the last 8 rows (all, if there were fewer)."""
    x = rows(sum(sizes))
    statistics = fed(list(x.split(sizes)))
    assert sorted_rows(statistics.rows()) == sorted_rows(x[-RING:])
    assert int(statistics.tokens[0]) == sum(sizes)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("position", [0, 2, -1])
def test_rows_that_are_not_finite_do_not_count(bad: float, position: int) -> None:
    """A row with NaN, Inf or an overflowing square adds to neither energy, tokens nor ring, wherever it stands."""
    x = rows(6)
    x[position, 5] = bad
    good = torch.ones(6, dtype=torch.bool)
    good[position] = False
    statistics, grouped = fed([x, rows(3, seed=1)]), SiteStatistics(K, 2)
    grouped.update(x, x, torch.ones(6, dtype=torch.int64))
    want = torch.cat((x[good], rows(3, seed=1)))
    assert int(statistics.tokens[0]) == 8
    assert sorted_rows(statistics.rows()) == sorted_rows(want)
    torch.testing.assert_close(statistics.energy[0], want.to(torch.float64).square().sum(dim=0), rtol=1e-6, atol=0)
    assert grouped.tokens.tolist() == [0, 5]
    torch.testing.assert_close(grouped.energy[1], x[good].to(torch.float64).square().sum(dim=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [5, 8, 30])
def test_center_is_the_mean_or_median_of_the_ring(count: int) -> None:
    """MEAN and MEDIAN are per channel over the ring's rows (lower median of an even number); NONE is zero."""
    x = rows(count)
    kept, statistics = x[-RING:], fed([x])
    ordered = kept.sort(dim=0).values
    torch.testing.assert_close(statistics.center(Centering.MEAN), kept.mean(dim=0))
    assert torch.equal(statistics.center(Centering.MEDIAN), ordered[(len(kept) - 1) // 2])
    assert torch.equal(statistics.center(Centering.NONE), torch.zeros(K))
    assert statistics.center(Centering.MEDIAN).dtype == torch.float32


def test_center_of_nothing_is_zero_and_of_no_ring_an_error() -> None:
    """Without rows nothing is subtracted; asking a site that keeps no rows is refused, not answered with zeros."""
    for kind in (Centering.MEAN, Centering.MEDIAN):
        assert not SiteStatistics(K, ring_rows=RING).center(kind).any()
        with pytest.raises(FormatError, match="ring"):
            SiteStatistics(K).center(kind)
    with pytest.raises(FormatError, match="ring_rows: is 8 for a site of 2 groups"):
        SiteStatistics(K, 2, ring_rows=RING)


@pytest.mark.parametrize("rule", list(BlockScaleRule))
@pytest.mark.parametrize("g", [None, torch.tensor(15.0)], ids=["token", "static"])
def test_energy_under_another_center(rule: BlockScaleRule, g: Tensor | None) -> None:
    """The energy predicted for a new centring vector is that of quantizing the ring's rows with it."""
    x = activations(20, K).to(torch.bfloat16)
    statistics = SiteStatistics(K, ring_rows=64)
    statistics.update(x, torch.zeros(20, K))
    center = statistics.center(Centering.MEAN)
    q = quantize_activation(x, g=g, rule=rule, center=center).dequantize().to(torch.float64)
    want = (x.to(torch.float64) - center.to(torch.float64) - q).square().mean(dim=0, keepdim=True)
    torch.testing.assert_close(statistics.mean_energy_centered(center, rule, g), want, rtol=1e-4, atol=1e-12)
    empty = SiteStatistics(K, ring_rows=64)
    assert not empty.mean_energy_centered(center, rule, g).any()


def test_update_and_reset_stay_in_place() -> None:
    """Every accumulator keeps its address and shape through update and reset, and reset forgets everything."""
    statistics = SiteStatistics(K, ring_rows=RING)
    tensors = {name: t for name, t in vars(statistics).items() if isinstance(t, Tensor)}
    assert {"energy", "tokens", "ring"} <= set(tensors)
    before = {name: (t.data_ptr(), t.shape) for name, t in tensors.items()}
    statistics.update(rows(20), rows(20))
    assert all(t.any() for t in (statistics.energy, statistics.tokens, statistics.ring))
    statistics.reset()
    assert {name: (getattr(statistics, name).data_ptr(), t.shape) for name, t in tensors.items()} == before
    assert not any(t.any() for t in tensors.values())
    statistics.update(rows(5), rows(5))
    assert sorted_rows(statistics.rows()) == sorted_rows(rows(5))


@pytest.mark.parametrize("group", [False, True])
def test_update_never_reads_a_value_on_the_host(group: bool) -> None:
    """`update` works on tensors without values: no host synchronisation, so a CUDA graph can capture it."""
    statistics = SiteStatistics(K, 4 if group else 1, ring_rows=0 if group else RING, device="meta")
    x = torch.empty(20, K, device="meta")
    statistics.update(x, x, torch.empty(20, dtype=torch.int64, device="meta") if group else None)
    with pytest.raises(RuntimeError):
        statistics.rows() if not group else int(statistics.tokens[0])  # reading one does raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_any_float_dtype(dtype: torch.dtype) -> None:
    """The ring takes rows of any activation dtype; empty steps change nothing."""
    statistics = SiteStatistics(K, ring_rows=RING)
    x = rows(4).to(dtype)
    statistics.update(x[:0], torch.zeros(0, K))
    statistics.update(x, torch.zeros(4, K))
    assert int(statistics.tokens[0]) == 4
    assert sorted_rows(statistics.rows()) == sorted_rows(x.to(torch.bfloat16))
