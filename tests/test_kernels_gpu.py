# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compute what the reference computes. Needs an H100 or H200 and nvcc."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_quads.compensation.forms import merged, quantize_with_residual
from vllm_quads.kernels import MoECompensation, PreparedMoE, Tuning, prepare_moe_weights, quads_moe
from vllm_quads.kernels.layout import (
    arrange,
    arrange_into,
    arranged_shape,
    by_chunk,
    gate_up_order,
    pair_order,
    unarrange,
)
from vllm_quads.kernels.plan import Gemm
from vllm_quads.kernels.quantize import quantize_merged, quantize_packed
from vllm_quads.nvfp4 import BlockScaleRule, PackedTensor, unswizzle
from vllm_quads.nvfp4.formats import pack_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RULES = [BlockScaleRule.MAX_TO_SIX, BlockScaleRule.FOUR_OVER_SIX]


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Heavy-tailed rows with outlier channels, zero blocks, a zero row, exact ties and tiny values."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=gen) * torch.exp(1.5 * torch.randn(m, 1, generator=gen))
    x[:, :: max(k // 7, 1)] *= 30
    if m > 4:
        x[1] = 0
        x[2, :16] = 0
        x[3] = (torch.randint(-24, 25, (k,), generator=gen) * 0.25).to(x)
        x[4] = x[4] * 1e-20
        x[0, ::3] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "k"), [(1, 16), (5, 48), (33, 192), (64, 576), (17, 768), (300, 2048), (9, 7168), (6, 16384)]
)
def test_merged_quantization_is_bit_identical(m: int, k: int, dtype: torch.dtype, rule: BlockScaleRule) -> None:
    """Merged operands and decode scales equal the reference bit for bit: masks, full rows, centring, static g."""
    four = rule is BlockScaleRule.FOUR_OVER_SIX
    x = activations(m, k, dtype, m + k)
    gen = torch.Generator().manual_seed(1)
    mask = torch.rand(3, k // 16, generator=gen) < 0.4
    group = torch.randint(0, 3, (m,), generator=gen, dtype=torch.int32)
    full = torch.rand(m, generator=gen) < 0.3
    center = torch.randn(k, generator=gen) * 0.1
    for use_center, g in ((False, None), (True, None), (True, torch.tensor([3.0, 700.0, 51.7]))):
        c = quantize_with_residual(
            x, rule=rule, center=center if use_center else None, g=None if g is None else g[group.long()][:, None]
        )
        chosen = mask[group.long()] | full[:, None]
        want = merged(c, chosen)
        got = quantize_merged(
            x.cuda(),
            four_over_six=four,
            mask=mask.cuda(),
            group=group.cuda(),
            full=full.cuda(),
            center=by_chunk(center).cuda() if use_center else None,
            center_by_chunk=True,
            g=None if g is None else g.cuda(),
        )
        assert torch.equal(got.decode_scale.cpu(), c.main.decode_scale.expand(m, 1)[:, 0])
        # -0 and +0 are the same operand: compared as numbers
        assert torch.equal(got.values.cpu(), want)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (130, 768), (200, 2048)])
def test_packed_quantization_is_bit_identical(m: int, k: int, swizzled: bool, rule: BlockScaleRule) -> None:
    """Codes and block scales, K + S appended, linear and swizzled, equal the reference byte for byte."""
    x = activations(m, k, torch.bfloat16, m)
    blocks = torch.arange(1, k // 16, 3, dtype=torch.int32)
    c = quantize_with_residual(x, rule=rule)
    columns = (blocks.long()[:, None] * 16 + torch.arange(16)).flatten()
    codes = pack_codes(torch.cat((c.main.codes(), c.residual.codes()[:, columns]), dim=1))
    raw = [q.scales.view(torch.uint8) for q in c]
    scales = torch.cat((raw[0], raw[1][:, blocks.long()]), dim=1)
    got = quantize_packed(
        x.cuda(), blocks=blocks.cuda(), four_over_six=rule is BlockScaleRule.FOUR_OVER_SIX, swizzled=swizzled
    )
    got_scales = got.scales.cpu()
    if swizzled:
        got_scales = unswizzle(got_scales, m, k // 16 + blocks.numel())
    assert torch.equal(got.codes.cpu(), codes)
    assert torch.equal(got_scales.view(torch.uint8), scales)


def test_non_finite_activations_stay_visible() -> None:
    """NaN and Inf never become finite operands: at least their block is NaN."""
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    x[0, 5], x[1, 20], x[2, 40] = float("nan"), float("inf"), float("-inf")
    got = quantize_merged(x.cuda(), full_all=True).values.cpu()
    for row, block in ((0, 0), (1, 1), (2, 2)):
        assert bool(torch.isnan(got[row, 16 * block : 16 * block + 16]).all())
    assert bool(torch.isfinite(got[3]).all())


class Layer:
    """A random MoE layer and its reference."""

    def __init__(self, experts: int, hidden: int, intermediate: int, seed: int = 0) -> None:
        gen = torch.Generator(device="cuda").manual_seed(seed)
        w13 = torch.randn(experts, 2, intermediate, hidden, device="cuda", generator=gen) * 0.05
        w13[:, 1] *= 1.7  # unequal global scales of gate and up
        w2 = torch.randn(experts, hidden, intermediate, device="cuda", generator=gen) * 0.05
        self.w13 = PackedTensor.quantize(w13.to(torch.bfloat16))
        self.w2 = PackedTensor.quantize(w2.to(torch.bfloat16))
        self.prepared: PreparedMoE = prepare_moe_weights(
            self.w13.codes.flatten(1, 2),
            self.w13.block_scales.view(torch.uint8).flatten(1, 2).view(torch.float8_e4m3fn),
            self.w13.decode_scale,
            self.w2.codes,
            self.w2.block_scales,
            self.w2.decode_scale,
        )
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate

    def reference(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        four: bool,
        c: MoECompensation,
    ) -> Tensor:
        """FP64 GEMMs on the kernels' own operands; intermediate rounded to x's dtype as the kernels do."""
        operand = quantize_merged(
            x, four_over_six=four, mask=c.mask13, full=c.full, full_all=c.full_all, center=c.center13
        )
        a = operand.values.double() * operand.decode_scale.double()[:, None]
        out = torch.zeros(x.shape[0], self.hidden, dtype=torch.float64, device=x.device)
        for e in range(self.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if not token.numel():
                continue
            w = self.w13.scaled()[e].double() * self.w13.decode_scale[e].double()[:, None, None]
            gate, up = a[token] @ w[0].T, a[token] @ w[1].T
            if c.bias13 is not None:
                gate, up = gate + c.bias13[e, : self.intermediate], up + c.bias13[e, self.intermediate :]
            h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
            mask2 = None if c.mask2 is None else c.mask2[e : e + 1]
            full = None if c.full is None else c.full[token].contiguous()
            o2 = quantize_merged(h, four_over_six=four, mask=mask2, full=full, full_all=c.full_all)
            y = (o2.values.double() * o2.decode_scale.double()[:, None]) @ (
                self.w2.scaled()[e].double() * self.w2.decode_scale[e].double()
            ).T
            out.index_add_(0, token, y * weights[token, slot].double()[:, None])
        return out


def routing(
    tokens: int, experts: int, top_k: int, seed: int, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, device="cuda", generator=gen)
    ids = scores.topk(top_k, dim=1).indices.to(dtype).contiguous()
    return torch.rand(tokens, top_k, device="cuda", generator=gen), ids


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def both(gemm: Gemm, k_groups: int = 1, **rest: Any) -> Tuning:
    """The same kernel for both GEMMs."""
    return Tuning(gemm1=gemm, gemm2=gemm, k_groups1=k_groups, k_groups2=k_groups, **rest)


VARIANTS = {
    "decode-k1": both(Gemm.DECODE),
    "decode-k2": both(Gemm.DECODE, 2),
    "decode-k4": both(Gemm.DECODE, 4),
    "decode-k2-cap8": both(Gemm.DECODE, 2, capacity=8, float32_partials=False),
    "decode-k4-cap16": both(Gemm.DECODE, 4, capacity=16, early_weights=False),
    "batch-k1": both(Gemm.BATCH),
    "batch-k2": both(Gemm.BATCH, 2, early_weights=False),
    "batch-k4": both(Gemm.BATCH, 4, float32_partials=False),
    "batch-k1-cap8": both(Gemm.BATCH, capacity=8),
    "batch-k2-cap48": both(Gemm.BATCH, 2, capacity=48),
    "wide": both(Gemm.WIDE),
    "wide-cap40": both(Gemm.WIDE, capacity=40, early_weights=False),
    "prefill": both(Gemm.PREFILL, float32_partials=False),
    "mixed-splits": Tuning(gemm1=Gemm.BATCH, gemm2=Gemm.BATCH, k_groups2=1, splits=2),
    "prefill-cap64": both(Gemm.PREFILL, capacity=64),
    "mixed": Tuning(gemm1=Gemm.DECODE, gemm2=Gemm.BATCH, capacity=16),
    "default": Tuning(),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "top_k", "tokens"),
    [
        (8, 576, 192, 8, 3),
        (8, 2048, 768, 2, 1),
        (8, 2048, 768, 2, 64),
        (4, 1024, 320, 2, 150),
        (4, 512, 96, 3, 600),
        (12, 512, 96, 10, 130),
        (3, 256, 192, 1, 5),
        (16, 2048, 768, 8, 250),
        (4, 7168, 256, 2, 37),
        (2, 256, 14336, 1, 20),
    ],
)
def test_layer_matches_fp64(
    variant: str, experts: int, hidden: int, intermediate: int, top_k: int, tokens: int
) -> None:
    """Every GEMM variant matches FP64 on the same operands to the rounding of its BF16 output (and of h)."""
    tuning = VARIANTS[variant]
    depth = hidden if tuning.gemm2 is Gemm.BATCH else max(hidden, intermediate)  # the longest K of a decode GEMM
    if Gemm.DECODE in (tuning.gemm1, tuning.gemm2) and depth > 4096:
        if depth > 8192:
            pytest.skip("not even 8 tokens fit")
        tuning = replace(tuning, capacity=8)
    layer, x, weights, ids, c, references = case(experts, hidden, intermediate, top_k, tokens)
    for four, want in references.items():
        got = quads_moe(x, layer.prepared, weights, ids, compensation=c, four_over_six=four, tuning=tuning)
        # Rows span 1e-20 to 1e3: each row is held to its own norm. An h that lands on the other side of a rounding
        # boundary moves one code, hence the slack over 2^-9.
        rows = (got.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
        assert float(rows.max()) < 1.5e-2, rows.max()
        assert relative_error(got, want) < 4e-3


@functools.cache
def case(
    experts: int, hidden: int, intermediate: int, top_k: int, tokens: int
) -> tuple[Layer, Tensor, Tensor, Tensor, MoECompensation, dict[bool, Tensor]]:
    """A layer, its inputs, and what FP64 makes of them without and with four-over-six."""
    layer = Layer(experts, hidden, intermediate)
    x = activations(tokens, hidden, torch.bfloat16, tokens).cuda()
    weights, ids = routing(tokens, experts, top_k, tokens)
    gen = torch.Generator(device="cuda").manual_seed(5)
    center = torch.randn(hidden, device="cuda", generator=gen) * 0.02
    c = MoECompensation(
        mask13=torch.rand(1, hidden // 16, device="cuda", generator=gen) < 0.25,
        mask2=torch.rand(experts, intermediate // 16, device="cuda", generator=gen) < 0.25,
        center13=center,
        center13_by_chunk=by_chunk(center),
        bias13=torch.randn(experts, 2 * intermediate, device="cuda", generator=gen) * 0.1,
        full=torch.rand(tokens, device="cuda", generator=gen) < 0.5,
    )
    return layer, x, weights, ids, c, {four: layer.reference(x, weights, ids, four, c) for four in (False, True)}


def test_partial_expert_map_and_ids_out_of_range() -> None:
    """Pairs of experts that live elsewhere contribute nothing; int64 ids work; no local expert gives 0."""
    layer = Layer(4, 512, 128)
    x = activations(40, 512, torch.bfloat16).cuda()
    weights, ids = routing(40, 8, 2, 3, torch.int64)
    expert_map = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    expert_map[torch.tensor([1, 3, 4, 6])] = torch.arange(4, dtype=torch.int32, device="cuda")
    local = expert_map[ids]
    want = layer.reference(x, weights, local, False, MoECompensation())
    got = quads_moe(x, layer.prepared, weights, ids, expert_map=expert_map)
    assert relative_error(got, want) < 4e-3
    assert bool((got[(local < 0).all(dim=1)] == 0).all())
    got = quads_moe(x, layer.prepared, weights, local.to(torch.int32))
    assert relative_error(got, want) < 4e-3


@pytest.mark.parametrize("tokens", [1, 12, 60, 600])
def test_launches_that_queue_up_compute_what_they_compute_alone(tokens: int) -> None:
    """Kernels that start before their predecessor has ended read nothing too early: layers of changing routing, with
    experts that live elsewhere, give bit for bit the same when they queue behind a busy GPU as alone."""
    layer, cases = Layer(32, 1024, 256), 4
    expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    expert_map[::2] = torch.arange(32, dtype=torch.int32, device="cuda")
    x = [activations(tokens, 1024, torch.bfloat16, seed).cuda() for seed in range(cases)]
    routed = [routing(tokens, 64, 8, seed) for seed in range(cases)]
    full = torch.rand(tokens, device="cuda") < 0.5
    mask = torch.rand(32, 16, device="cuda") < 0.25
    compensation = MoECompensation(mask2=mask, full=full)

    def run(i: int) -> Tensor:
        return quads_moe(x[i], layer.prepared, *routed[i], expert_map=expert_map, compensation=compensation)

    alone = []
    for i in range(cases):
        alone.append(run(i))
        torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)  # about 20 ms, in which all launches below are queued
    queued = [run(i % cases) for i in range(200)]
    assert all(bool(torch.equal(y, alone[i % cases])) for i, y in enumerate(queued))


def test_no_tokens_and_experts_without_tokens() -> None:
    """A batch of no tokens gives no rows; all tokens may choose one and the same expert."""
    layer = Layer(8, 512, 128)
    x = activations(20, 512, torch.bfloat16).cuda()
    weights, ids = routing(20, 8, 2, 3)
    for dtype in (torch.bfloat16, torch.float16):
        assert quads_moe(x[:0].to(dtype), layer.prepared, weights[:0], ids[:0]).shape == (0, 512)
    ids.fill_(5)
    want = layer.reference(x, weights, ids, False, MoECompensation())
    assert relative_error(quads_moe(x, layer.prepared, weights, ids), want) < 4e-3


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Within one GEMM variant, a token's output is bitwise the same alone, in a batch, and run after run."""
    layer = Layer(8, 1024, 256)
    x = activations(48, 1024, torch.bfloat16).cuda()
    weights, ids = routing(48, 8, 4, 7)
    for tuning in (*map(both, Gemm), both(Gemm.BATCH, 2)):
        whole = quads_moe(x, layer.prepared, weights, ids, tuning=tuning)
        for _ in range(3):
            assert torch.equal(whole, quads_moe(x, layer.prepared, weights, ids, tuning=tuning))
        for i in (0, 17, 47):
            one = quads_moe(
                x[i : i + 1],
                layer.prepared,
                weights[i : i + 1].contiguous(),
                ids[i : i + 1].contiguous(),
                tuning=tuning,
            )
            assert torch.equal(one[0], whole[i])


def test_captured_graph_sees_new_inputs_weights_and_state() -> None:
    """A captured graph replays with new activations, routing, refitted weights and compensation masks."""
    layer, other = Layer(8, 512, 128, seed=1), Layer(8, 512, 128, seed=2)
    x = activations(16, 512, torch.bfloat16).cuda()
    weights, ids = routing(16, 8, 2, 1)
    c = MoECompensation(mask13=torch.zeros(1, 32, dtype=torch.bool, device="cuda"))
    quads_moe(x, layer.prepared, weights, ids, compensation=c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quads_moe(x, layer.prepared, weights, ids, compensation=c)
    x.copy_(activations(16, 512, torch.bfloat16, seed=9))
    new_weights, new_ids = routing(16, 8, 2, 2)
    weights.copy_(new_weights)
    ids.copy_(new_ids)
    assert c.mask13 is not None
    c.mask13.fill_(True)
    prepare_moe_weights(
        other.w13.codes.flatten(1, 2),
        other.w13.block_scales.view(torch.uint8).flatten(1, 2).view(torch.float8_e4m3fn),
        other.w13.decode_scale,
        other.w2.codes,
        other.w2.block_scales,
        other.w2.decode_scale,
        out=layer.prepared,
    )
    graph.replay()
    assert relative_error(y, other.reference(x, weights, ids, False, c)) < 4e-3
    assert torch.equal(y, quads_moe(x, other.prepared, weights, ids, compensation=c))


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize(("experts", "n", "k"), [(3, 96, 80), (2, 1536, 2048), (1, 128, 48), (5, 320, 7168)])
def test_arranging_on_the_gpu_equals_torch(experts: int, n: int, k: int, gate_up: bool) -> None:
    """The layout kernel writes the bytes of the torch path, into a range of a stack too, and comes back exactly."""
    gen = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (experts, n, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.randint(0, 128, (experts, n, k // 16), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn)
    want = arrange(codes, scales, gate_up_order(n // 2) if gate_up else pair_order(n))
    out = torch.full((experts + 2, *arranged_shape(n, k)), 170, dtype=torch.uint8, device="cuda")
    arrange_into(codes.cuda(), scales.cuda(), out[1:-1], gate_up=gate_up)
    assert torch.equal(out[1:-1].cpu(), want)
    assert bool((out[0] == 170).all())
    assert bool((out[-1] == 170).all())
    back = unarrange(out[1:-1], n, k, gate_up=gate_up)
    assert torch.equal(back[0].cpu(), codes)
    assert torch.equal(back[1].cpu().view(torch.uint8), scales.view(torch.uint8))
