# SPDX-License-Identifier: Apache-2.0
"""Compensation on a GPU: the CPU's bits, and statistics inside a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch
from rac_data import Layer, activations, random_site, routing

from vllm_quads.compensation import SiteState, SiteStatistics, experts_forward, quantize_with_residual
from vllm_quads.nvfp4 import BlockScaleRule, Compensation, Contract, Form

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("rule", list(BlockScaleRule))
@pytest.mark.parametrize("centered", [False, True])
def test_quantization_has_the_same_bits_on_cpu_and_gpu(rule: BlockScaleRule, centered: bool) -> None:
    """Codes, block scales and global scales do not depend on the device, for tiny, huge and bad rows either."""
    x = activations(512, 256) * torch.logspace(-38, 30, 512)[:, None]
    x[3, 16:32] = 0.0
    x[4, 5] = torch.nan
    x[5, 6] = torch.inf
    x[6] = 0.0
    center = random_site(256, centered=True).center if centered else None
    here = quantize_with_residual(x, rule=rule, center=center)
    there = quantize_with_residual(x.cuda(), rule=rule, center=None if center is None else center.cuda())
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.codes(), b.codes().cpu())
        assert torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8).cpu())
        torch.testing.assert_close(a.decode_scale, b.decode_scale.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("groups", [1, 4])
def test_statistics_can_be_captured(groups: int) -> None:
    """Replays of a captured update add up to what eager updates do, with new rows, groups and NaN padding each time."""
    m, k, ring = 24, 64, 40 if groups == 1 else 0
    eager, captured = (SiteStatistics(k, groups, ring_rows=ring, device="cuda") for _ in range(2))
    x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    residual, group = torch.zeros(m, k, device="cuda"), torch.zeros(m, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.update(x, residual, group if groups > 1 else None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(x, residual, group if groups > 1 else None)
    captured.reset()
    for step in range(5):
        rows = activations(m, k, seed=step).to(torch.bfloat16).cuda()
        rows[m - step :] = torch.nan
        x.copy_(rows)
        residual.copy_(rows)
        group.copy_(torch.randint(0, groups, (m,)))
        graph.replay()
        eager.update(x, residual, group if groups > 1 else None)
    assert torch.equal(captured.tokens, eager.tokens)
    assert int(captured.tokens.sum()) == 5 * m - 10
    assert torch.equal(captured.ring, eager.ring)
    torch.testing.assert_close(captured.energy, eager.energy, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", list(Form))
def test_reference_forward_agrees_across_devices(form: Form) -> None:
    """The reference MoE forward gives the same layer output on both devices, up to float32 summation."""
    layer, x = Layer(), activations(24, 64, dtype=torch.float32)
    w13, w2 = random_site(64, centered=True), random_site(48, layer.experts, seed=1)
    weights, ids = routing(24, layer.experts, 3)
    decode = torch.arange(24) % 2 == 0
    contract = Contract(compensation=Compensation(form))
    here = experts_forward(x, layer.prepare(w13, w2), weights, ids, contract, w13_site=w13, decode=decode)
    layer.w13, layer.w2 = tuple(t.cuda() for t in layer.w13), tuple(t.cuda() for t in layer.w2)
    w13, w2 = (SiteState(s.center.cuda(), s.blocks.cuda()) for s in (w13, w2))
    prepared = layer.prepare(w13, w2)
    there = experts_forward(
        x.cuda(), prepared, weights.cuda(), ids.cuda(), contract, w13_site=w13, decode=decode.cuda()
    )
    # SiLU's exponential differs between devices in the last bit, which may move an intermediate code.
    error = (there.cpu() - here).square().mean() / here.square().mean()
    assert error < 1e-6
