# SPDX-License-Identifier: Apache-2.0
"""Which GEMM kernel runs where is decided from shapes alone, and every plan fits the kernels' limits."""

from __future__ import annotations

import pytest
import torch

from vllm_quads.kernels import MoECompensation, PreparedMoE, quads_moe
from vllm_quads.kernels.plan import (
    DeviceLimits,
    Gemm,
    GemmChoice,
    LayerShape,
    LinearShape,
    plan_layer,
    plan_linear,
)
from vllm_quads.nvfp4 import FormatError


def decode_capacity(k: int, groups: int) -> int:
    """Roughly what the decode kernel's shared memory allows: tokens x K in FP16 beside three ring stages."""
    return min(32, (232448 - 3 * 18432 - 4096 * groups) // (2 * k + 16) // 8 * 8)


LIMITS = DeviceLimits(132, decode_capacity, {1: 64, 2: 48, 4: 32}.__getitem__)
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3-ep8": (32, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "tensor-parallel": (128, 10, 2048, 96),
}
TOKENS = (1, 2, 3, 4, 7, 16, 33, 64, 128, 200, 256, 512, 1000, 4096, 16384)


@pytest.mark.parametrize("name", SHAPES)
def test_every_plan_fits(name: str) -> None:
    """For any number of tokens the capacity is a multiple of 8 that both chosen kernels have room for."""
    experts, top_k, hidden, inter = SHAPES[name]
    for tokens in TOKENS:
        plan = plan_layer(LayerShape(tokens, top_k, experts, experts, hidden, inter), LIMITS)
        assert plan.capacity % 8 == 0
        for choice, k in ((plan.first, hidden), (plan.second, inter)):
            most = {
                Gemm.DECODE: decode_capacity(-(-k // 256) * 256, choice.k_groups),
                Gemm.BATCH: LIMITS.batch_capacity(choice.k_groups),
                Gemm.WIDE: 96,
                Gemm.PREFILL: 160,
            }[choice.gemm]
            assert 8 <= plan.capacity <= most
        for n, k in ((2 * inter, hidden), (hidden, inter)):
            linear = plan_linear(LinearShape(tokens, n, k), LIMITS)
            assert linear.capacity % 8 == 0
            assert 8 <= linear.capacity <= 160
            assert -(-k // 256) * 4 % (linear.kernel.k_groups * linear.splits) == 0


def test_plans_follow_the_number_of_tokens() -> None:
    """Few tokens decode with resident tokens and small units, many prefill; K that nothing is resident for streams."""
    experts, top_k, hidden, inter = SHAPES["qwen3-30b-a3b"]
    plans = {m: plan_layer(LayerShape(m, top_k, experts, experts, hidden, inter), LIMITS) for m in TOKENS}
    assert plans[1].first == GemmChoice(Gemm.DECODE, 4)
    assert plans[64].first == plans[64].second == GemmChoice(Gemm.DECODE, 1)
    assert plans[256].first == GemmChoice(Gemm.BATCH)
    assert plans[1000].first == plans[1000].second == GemmChoice(Gemm.WIDE)
    assert plans[1000].capacity == 96
    assert plans[4096].first == plans[4096].second == GemmChoice(Gemm.PREFILL)
    assert plans[4096].capacity == 160  # an expert's 256 tokens in two parts
    assert plan_layer(LayerShape(512, 8, 32, 32, 7168, 2048), LIMITS).first.gemm is Gemm.PREFILL  # 128 in one
    mixtral = plan_layer(LayerShape(1, 2, 8, 8, 4096, 14336), LIMITS)
    assert mixtral.first.gemm is Gemm.DECODE
    assert mixtral.second.gemm is Gemm.BATCH
    assert mixtral.second.k_groups > 1  # 2 experts x 4096 rows would leave most multiprocessors idle
    assert mixtral.splits > 1
    # 8 experts x 4096 rows are 88 units of 384 rows, but 128 of 256
    assert plan_layer(LayerShape(256, 2, 8, 8, 4096, 14336), LIMITS).second.gemm is Gemm.PREFILL


def test_experts_elsewhere_do_not_change_an_experts_share() -> None:
    """Under expert parallelism the mean tokens an expert are those of all experts, not of the local ones."""
    whole = plan_layer(LayerShape(512, 8, 128, 128, 2048, 768), LIMITS, k_groups=(1, 1))
    part = plan_layer(LayerShape(512, 8, 16, 128, 2048, 768), LIMITS, k_groups=(1, 1))
    assert whole.capacity == part.capacity
    assert whole.first.gemm is part.first.gemm


def test_what_does_not_fit_is_refused() -> None:
    """Overrides that shared memory has no room for raise and say so."""
    shape = LayerShape(64, 8, 32, 32, 7168, 2048)
    assert plan_layer(shape, LIMITS, gemms=(Gemm.BATCH, Gemm.PREFILL), capacity=16).capacity == 16
    with pytest.raises(FormatError, match="room for 8"):
        plan_layer(shape, LIMITS, gemms=(Gemm.DECODE, Gemm.DECODE), capacity=32)
    narrow = LayerShape(600, 3, 4, 4, 512, 96)
    assert plan_layer(narrow, LIMITS, gemms=(None, Gemm.BATCH), k_groups=(None, 1), splits=4).splits == 4
    for options in (
        {"k_groups": (None, 4), "splits": 2},
        {"k_groups": (None, 1), "splits": 3},
        {"k_groups": (None, 1), "splits": 0},
    ):
        with pytest.raises(FormatError, match="cannot cut K = 256"):
            plan_layer(narrow, LIMITS, gemms=(None, Gemm.BATCH), **options)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="multiple of 8"):
        plan_layer(narrow, LIMITS, capacity=12)
    with pytest.raises(FormatError, match="1, 2 or 4"):
        plan_layer(narrow, LIMITS, k_groups=(3, None))
    with pytest.raises(FormatError, match="not even 8"):
        plan_layer(LayerShape(64, 2, 8, 8, 4096, 14336), LIMITS, gemms=(None, Gemm.DECODE))


def test_arguments_of_a_layer_that_do_not_fit_are_refused() -> None:
    """Before anything is launched: compensation of 16-bit activations, and an output of another dtype or shape."""
    blocks, scales = torch.empty(2, 1, 2304, dtype=torch.uint8), torch.ones(2, 2)
    layer = PreparedMoE(blocks, blocks, scales, scales, 64, 48)
    x, ids = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
    weights = torch.ones(3, 2)
    for compensation in (MoECompensation(full_all=True), MoECompensation(center13=torch.ones(64))):
        with pytest.raises(FormatError, match="not quantized"):
            quads_moe(x, layer, weights, ids, quantized=False, compensation=compensation)
    for out in (torch.zeros(3, 64), torch.zeros(2, 64, dtype=torch.bfloat16)):
        with pytest.raises(FormatError, match="out is"):
            quads_moe(x, layer, weights, ids, out=out)
