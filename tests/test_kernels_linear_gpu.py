# SPDX-License-Identifier: Apache-2.0
"""Dense NVFP4 linears and W4A16 on the Hopper kernels. Needs an H100 or H200 and nvcc."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_quads.compensation.forms import merged, quantize_with_residual
from vllm_quads.kernels import PreparedMoE, Tuning, prepare_moe_weights, quads_moe
from vllm_quads.kernels.linear import LinearCompensation, prepare_linear, quads_linear
from vllm_quads.kernels.plan import Gemm, GemmChoice, LinearPlan
from vllm_quads.nvfp4 import BlockScaleRule, FormatError, PackedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def activations(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of very different size with outlier channels."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=gen) * torch.exp(1.5 * torch.randn(m, 1, generator=gen))
    x[:, :: max(k // 7, 1)] *= 30
    return x.to(dtype).cuda()


def weight(n: int, k: int, seed: int = 0) -> PackedTensor:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return PackedTensor.quantize((torch.randn(n, k, device="cuda", generator=gen) * 0.05).to(torch.bfloat16))


def row_error(got: Tensor, want: Tensor) -> float:
    """Largest error of a row, relative to the row."""
    return float(((got.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)).max())


PLANS = [
    None,
    LinearPlan(GemmChoice(Gemm.DECODE, 1), 8),
    LinearPlan(GemmChoice(Gemm.DECODE, 4), 8),
    LinearPlan(GemmChoice(Gemm.BATCH, 1), 64),
    LinearPlan(GemmChoice(Gemm.BATCH, 2), 48, splits=2),
    LinearPlan(GemmChoice(Gemm.BATCH, 4), 32),
    LinearPlan(GemmChoice(Gemm.WIDE), 96),
    LinearPlan(GemmChoice(Gemm.PREFILL), 160),
    LinearPlan(GemmChoice(Gemm.PREFILL), 64, splits=2),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("m", [1, 7, 64, 333])
@pytest.mark.parametrize(("n", "k"), [(96, 2048), (1152, 576), (2048, 768)])
def test_linear_matches_fp64(n: int, k: int, m: int, plan: LinearPlan | None) -> None:
    """Every kernel matches FP64 on the same operands to output rounding: centring, bias, masks, scales per channel."""
    w = weight(n, k)
    channel = w.decode_scale * torch.linspace(0.5, 2.0, n, device="cuda")
    prepared = prepare_linear(w.codes, w.block_scales, channel)
    x = activations(m, k, seed=m)
    gen = torch.Generator(device="cuda").manual_seed(3)
    c = LinearCompensation(
        mask=torch.rand(k // 16, device="cuda", generator=gen) < 0.25,
        center=torch.randn(k, device="cuda", generator=gen) * 0.02,
        bias=torch.randn(n, device="cuda", generator=gen) * 0.1,
        full=torch.rand(m, device="cuda", generator=gen) < 0.5,
    )
    assert c.center is not None
    assert c.mask is not None
    assert c.full is not None
    assert c.bias is not None
    matrix = w.scaled().double() * channel[:, None].double()
    for four, g in ((False, None), (True, torch.tensor(20.0, device="cuda"))):
        got = quads_linear(x, prepared, compensation=c, four_over_six=four, g=g, plan=plan)
        rule = BlockScaleRule.FOUR_OVER_SIX if four else BlockScaleRule.MAX_TO_SIX
        q = quantize_with_residual(x.cpu(), rule=rule, center=c.center.cpu(), g=None if g is None else g.cpu())
        operand = merged(q, (c.mask | c.full[:, None]).cpu()).double() * q.main.decode_scale.expand(m, 1).double()
        assert row_error(got, operand.cuda() @ matrix.T + c.bias) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PLANS)
def test_w4a16_linear_matches_fp64(plan: LinearPlan | None, dtype: torch.dtype) -> None:
    """Unquantized activations lose nothing before the GEMM, rows of 1e-30 and 1e30 included; NaN and infinity show."""
    w = weight(320, 1024)
    prepared = prepare_linear(w.codes, w.block_scales, w.decode_scale)
    x = activations(40, 1024, dtype, 1)
    if dtype is torch.bfloat16:
        x[3], x[4] = x[3] * 1e-30, x[4] * 1e27
    x[5] = 0
    got = quads_linear(x, prepared, quantized=False, plan=plan)
    want = x.double() @ (w.scaled().double() * w.decode_scale.double()).T
    assert row_error(got, want) < (4e-3 if dtype is torch.bfloat16 else 6e-4)
    assert bool((got[5] == 0).all())
    x[7, 100], x[8, 1023] = float("nan"), float("inf")
    got = quads_linear(x, prepared, quantized=False, plan=plan)
    assert bool(torch.isnan(got[7]).all())
    assert not bool(torch.isfinite(got[8]).any())
    assert row_error(got[:7], want[:7]) < (4e-3 if dtype is torch.bfloat16 else 6e-4)


def test_linear_does_not_depend_on_its_batch_and_replays() -> None:
    """A row's output is bitwise that of the row alone (in one kernel); graphs see new weights; 0 rows are fine."""
    w, other = weight(256, 512, 1), weight(256, 512, 2)
    prepared = prepare_linear(w.codes, w.block_scales, w.decode_scale)
    x = activations(50, 512)
    for plan in PLANS[1:]:
        whole = quads_linear(x, prepared, plan=plan)
        assert torch.equal(whole, quads_linear(x, prepared, plan=plan))
        assert torch.equal(whole[17:18], quads_linear(x[17:18], prepared, plan=plan))
    assert quads_linear(x[:0], prepared).shape == (0, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quads_linear(x, prepared)
    prepare_linear(other.codes, other.block_scales, other.decode_scale, out=prepared)
    graph.replay()
    fresh = prepare_linear(other.codes, other.block_scales, other.decode_scale)
    assert torch.equal(y, quads_linear(x, fresh))


def test_strided_rows_and_refusals() -> None:
    """Rows of a wider matrix work; shapes that the kernels cannot take are refused by name."""
    w = weight(128, 256)
    prepared = prepare_linear(w.codes, w.block_scales, w.decode_scale)
    wide = activations(9, 512)
    assert torch.equal(quads_linear(wide[:, :256], prepared), quads_linear(wide[:, :256].contiguous(), prepared))
    with pytest.raises(FormatError, match=r"expected bfloat16 or float16 \[M, 256\]"):
        quads_linear(wide, prepared)
    odd = weight(24, 256)
    with pytest.raises(FormatError, match="multiple of 16"):
        prepare_linear(odd.codes, odd.block_scales, odd.decode_scale)


def experts(num: int, hidden: int, inter: int) -> tuple[PackedTensor, PackedTensor, PreparedMoE]:
    gen = torch.Generator(device="cuda").manual_seed(0)
    w13 = PackedTensor.quantize((torch.randn(num, 2, inter, hidden, device="cuda", generator=gen) * 0.05).bfloat16())
    w2 = PackedTensor.quantize((torch.randn(num, hidden, inter, device="cuda", generator=gen) * 0.05).bfloat16())
    scales = w13.block_scales.view(torch.uint8).flatten(1, 2).view(torch.float8_e4m3fn)
    prepared = prepare_moe_weights(
        w13.codes.flatten(1, 2), scales, w13.decode_scale, w2.codes, w2.block_scales, w2.decode_scale
    )
    return w13, w2, prepared


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(gemm1=Gemm.BATCH, gemm2=Gemm.PREFILL)])
@pytest.mark.parametrize("router_on_input", [False, True])
def test_w4a16_experts_and_router_weights_on_the_input(router_on_input: bool, tuning: Tuning) -> None:
    """A W4A16 layer matches FP64; router weights multiply the input of a top-1 layer (Llama 4), or else the output."""
    w13, w2, prepared = experts(4, 512, 96)
    x = activations(30, 512)
    top_k = 1 if router_on_input else 3
    gen = torch.Generator(device="cuda").manual_seed(4)
    ids = torch.rand(30, 4, device="cuda", generator=gen).topk(top_k, 1).indices.to(torch.int32).contiguous()
    weights = torch.rand(30, top_k, device="cuda", generator=gen)
    ids[11, 0] = -1
    got = quads_moe(x, prepared, weights, ids, quantized=False, router_on_input=router_on_input, tuning=tuning)
    scaled13, scaled2 = w13.scaled(), w2.scaled()
    want = torch.zeros(30, 512, dtype=torch.float64, device="cuda")
    for t in range(30):
        for slot in range(top_k):
            e = int(ids[t, slot])
            if e < 0:
                continue
            source = x[t] * weights[t, slot].to(x.dtype) if router_on_input else x[t]
            gate, up = (
                (part.double() * scale.double()) @ source.double()
                for part, scale in zip(scaled13[e], w13.decode_scale[e], strict=True)
            )
            h = (silu(gate) * up).to(x.dtype).double()
            y = (scaled2[e].double() * w2.decode_scale[e].double()) @ h
            want[t] += y if router_on_input else y * weights[t, slot].double()
    keep = torch.arange(30) != 11 if router_on_input else torch.ones(30, dtype=torch.bool)
    assert row_error(got[keep.cuda()], want[keep.cuda()]) < 1e-2
    if router_on_input:
        assert bool((got[11] == 0).all())
        with pytest.raises(FormatError, match="router_on_input"):
            quads_moe(
                x, prepared, weights.expand(30, 2).contiguous(), ids.expand(30, 2).contiguous(), router_on_input=True
            )
