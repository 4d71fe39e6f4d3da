# SPDX-License-Identifier: Apache-2.0
"""Error statistics that the Hopper kernel gathers are those of the reference. Needs an H100 or H200 and nvcc."""

from __future__ import annotations

import pytest
import torch
from rac_data import Layer, activations, routing
from torch import Tensor

from vllm_quads.compensation import SiteStatistics, experts_forward, prepare_experts, quantize_with_residual
from vllm_quads.compensation.linear import quantization_error
from vllm_quads.compensation.statistics import RING_ROWS
from vllm_quads.kernels import MoECompensation, prepare_moe_weights, quads_moe
from vllm_quads.kernels.linear import prepare_linear, quads_linear
from vllm_quads.kernels.quantize import quantize_merged
from vllm_quads.kernels.statistics import Gathering, gather_statistics
from vllm_quads.nvfp4 import BlockScaleRule, Contract, FormatError, PackedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
# Float32 sums of up to a few hundred squares in another order, then float64.
TOLERANCE = {"rtol": 2e-5, "atol": 1e-30}


def update(statistics: SiteStatistics, x: Tensor, four: bool, *, center: Tensor | None = None, g: Tensor | None = None,
           group: Tensor | None = None) -> None:  # fmt: skip
    """The reference: torch's quantization and `SiteStatistics.update`."""
    rule = BlockScaleRule.FOUR_OVER_SIX if four else BlockScaleRule.MAX_TO_SIX
    rows_g = None if g is None else (g if group is None else g[group.long()])[:, None] if g.numel() > 1 else g
    c = quantize_with_residual(x, rule=rule, center=center, g=rows_g)
    statistics.update(x, quantization_error(x, c, center), None if group is None else group.long())


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (7, 48), (64, 2048), (700, 768), (1500, 2048), (33, 7168), (5, 16384)])
def test_energy_tokens_and_ring_equal_the_reference(m: int, k: int, dtype: torch.dtype, four: bool) -> None:
    """Several steps of one site with centring: energies to float32 summation, tokens and ring exactly; NaN, Inf and
    absurd rows do not count."""
    want, got = (SiteStatistics(k, ring_rows=RING_ROWS, device="cuda") for _ in range(2))
    center = torch.randn(k, device="cuda") * 0.2
    for step in range(3):
        x = activations(m, k, seed=step).to(dtype).cuda()
        if m > 6:
            x[2, k // 2], x[4, 0], x[m - 1, 5] = torch.nan, torch.inf, -torch.inf
            x[3] = 0
        update(want, x, four, center=center)
        decode = quantize_merged(x, four_over_six=four, center=center).decode_scale
        gather_statistics(x, Gathering(got), four_over_six=four, center=center, decode=decode)
    torch.testing.assert_close(got.energy, want.energy, **TOLERANCE)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.written, want.written)
    assert torch.equal(got.ring, want.ring)
    assert not got.ticket.any()


@pytest.mark.parametrize("static", [False, True])
def test_groups_and_static_scales(static: bool) -> None:
    """Every row goes to the accumulator of its group, negative ones nowhere; with one static scale per group too."""
    groups, k = 9, 768
    group = torch.randint(-1, groups, (1000,), device="cuda", dtype=torch.int32)
    group[group == 4] = 3
    x = activations(1000, k).to(torch.bfloat16).cuda()
    g = torch.linspace(1.0, 60.0, groups, device="cuda") if static else None
    want, got = (SiteStatistics(k, groups, device="cuda") for _ in range(2))
    here = group >= 0
    update(want, x[here], True, g=g, group=group[here])
    gather_statistics(x, Gathering(got), four_over_six=True, g=g, group=group)
    torch.testing.assert_close(got.energy, want.energy, **TOLERANCE)
    assert torch.equal(got.tokens, want.tokens)


def test_static_scale_with_a_ring() -> None:
    """With a static scale, which says nothing about a row, rows that are not finite stay out of the ring as well."""
    want, got = (SiteStatistics(96, ring_rows=16, device="cuda") for _ in range(2))
    g = torch.tensor([21.0], device="cuda")
    for step in range(3):
        x = activations(11, 96, seed=step).to(torch.bfloat16).cuda()
        x[step, 7] = torch.nan
        update(want, x, False, g=g)
        gather_statistics(x, Gathering(got), g=g)
    assert torch.equal(got.ring, want.ring)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.energy, want.energy, **TOLERANCE)


def test_a_captured_graph_gathers_only_where_the_switch_is_on() -> None:
    """Replays follow the switch and the number of valid rows that the host sets between them, with fixed buffers."""
    m, k = 48, 512
    want, got = (SiteStatistics(k, ring_rows=64, device="cuda") for _ in range(2))
    valid = torch.zeros(1, dtype=torch.int32, device="cuda")
    gathering = Gathering(got, valid=valid)
    x = activations(m, k).to(torch.bfloat16).cuda()

    def step() -> None:
        decode = quantize_merged(x, four_over_six=True).decode_scale
        gather_statistics(x, gathering, four_over_six=True, decode=decode)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(8):
        x.copy_(activations(m, k, seed=i))
        got.paused.fill_(1 - i % 2)
        valid.fill_(m - 5 * i)
        graph.replay()
        if i % 2:
            update(want, x[: m - 5 * i], True)
    assert int(got.tokens) == sum(m - 5 * i for i in (1, 3, 5, 7))
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.ring, want.ring)
    torch.testing.assert_close(got.energy, want.energy, **TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_a_layer_gathers_both_sites(tokens: int) -> None:
    """The MoE layer adds its input to w13's accumulators and each expert's rows to w2's, as the reference forward does;
    padding rows and pairs of experts elsewhere are left out."""
    layer = Layer()
    packed = [tuple(t.cuda() for t in w) for w in (layer.w13, layer.w2)]
    want, got = ([SiteStatistics(64, ring_rows=64, device="cuda"), SiteStatistics(48, layer.experts, device="cuda")]
                 for _ in range(2))  # fmt: skip
    x = activations(tokens, 64).to(torch.bfloat16).cuda()
    weights, ids = (t.cuda() for t in routing(tokens, layer.experts, 3))
    ids[::5, 1] = -1
    count = max(1, tokens - 3)
    experts_forward(
        x[:count], prepare_experts(*packed), weights[:count], ids[:count], Contract(),  # type: ignore[arg-type]
        decode=torch.ones(count, dtype=torch.bool, device="cuda"), w13_statistics=want[0], w2_statistics=want[1],
    )  # fmt: skip
    gathering = Gathering(*got, valid=torch.tensor([count], dtype=torch.int32, device="cuda"))
    quads_moe(
        x, prepare_moe_weights(*packed[0], *packed[1]), weights, ids.int(), four_over_six=True, statistics=gathering,
        compensation=MoECompensation(full_all=True),
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(got[0].ring, want[0].ring)
    torch.testing.assert_close(got[0].energy, want[0].energy, **TOLERANCE)
    # the two compute w2's input by different sums, and round it to bfloat16
    assert float((got[1].energy - want[1].energy).norm() / want[1].energy.norm()) < 3e-2


def test_a_linear_gathers_its_input() -> None:
    """A dense linear adds its input to the site's accumulators, under the centring vector that it subtracts."""
    x = activations(50, 128).to(torch.bfloat16).cuda()
    weight = PackedTensor.quantize(torch.randn(64, 128, device="cuda"))
    prepared = prepare_linear(weight.codes, weight.block_scales, weight.decode_scale)
    want, got = (SiteStatistics(128, ring_rows=16, device="cuda") for _ in range(2))
    quads_linear(x, prepared, statistics=Gathering(got))
    update(want, x, False)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.ring, want.ring)
    torch.testing.assert_close(got.energy, want.energy, **TOLERANCE)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    """A missing group, another K and a missing decode scale are named before anything is launched."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(FormatError, match="group: is missing for statistics of 3 groups"):
        gather_statistics(x, Gathering(SiteStatistics(64, 3, device="cuda")))
    with pytest.raises(FormatError, match=r"expected bfloat16 or float16 \[M, 80\]"):
        gather_statistics(x, Gathering(SiteStatistics(80, device="cuda")))
    with pytest.raises(FormatError, match="decode: the ring needs"):
        gather_statistics(x, Gathering(SiteStatistics(64, ring_rows=8, device="cuda")))
