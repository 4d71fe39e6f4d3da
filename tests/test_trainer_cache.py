# SPDX-License-Identifier: Apache-2.0
"""The cache of quantized weights: used when it may be, and never stale, however a weight was changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from trainer_models import ALL_LINEARS, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import CacheMode, clear_cache, prepare_qat
from trainer_qat.cache import row_sums
from trainer_qat.prepare import expert_weights, quantizers_of
from vllm_quads.nvfp4 import Contract, FormatError, PackedTensor, WeightGlobalScale, fake_quantize_weight

MODES = [CacheMode.NONE, CacheMode.DENSE, CacheMode.PACKED]


def prepared(mode: CacheMode) -> nn.Module:
    """A tiny model with all linears quantized."""
    model = qwen3()
    prepare_qat(model, ALL_LINEARS, cache=mode)
    return model


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """Loss of one batch."""
    return model(tokens(seed=seed), labels=tokens(seed=seed)).loss


def counts(model: nn.Module) -> tuple[int, int]:
    """(hits, misses) over all quantized parameters."""
    caches = [q.cache for _, _, q in quantizers_of(model)]
    return sum(c.hits for c in caches), sum(c.misses for c in caches)


def step(model: nn.Module, **options: bool) -> None:
    """One AdamW step with gradients in place."""
    loss_of(model).backward()
    torch.optim.AdamW(model.parameters(), lr=0.05, **options).step()


def load(model: nn.Module, assign: bool) -> None:
    """load_state_dict with other weights."""
    model.load_state_dict({k: v * 1.3 if v.dim() == 3 else v for k, v in model.state_dict().items()}, assign=assign)


def replace_data(model: nn.Module) -> None:
    """`.data` assignment, twice, so that the second storage may lie where the first one was."""
    weight = model.model.layers[0].mlp.experts.down_proj
    weight.data = weight.data * 2
    weight.data = weight.data * 0.7


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "optimizer": step,
    "foreach optimizer": lambda m: step(m, foreach=True),
    "fused optimizer (leaves the version counter alone)": lambda m: step(m, fused=True),
    "load_state_dict": lambda m: load(m, assign=False),
    "load_state_dict(assign)": lambda m: load(m, assign=True),
    "in-place under no_grad": lambda m: m.model.layers[0].mlp.experts.down_proj.detach().mul_(1.1),
    "in-place through .data": lambda m: m.model.layers[0].mlp.experts.down_proj.data.mul_(1.1),
    "one element through .data": lambda m: m.model.layers[0].mlp.experts.down_proj.data[2, 3, 4].fill_(9.0),
    ".data assignment": replace_data,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_missed(change: str, mode: CacheMode) -> None:
    """After any kind of update the forward pass uses the quantization of the weights as they are now."""
    model = prepared(mode)
    experts = model.model.layers[0].mlp.experts
    loss_of(model)
    before = expert_weights(experts)[1].clone()
    CHANGES[change](model)
    after = expert_weights(experts)[1]
    assert not torch.equal(after, before)
    assert torch.equal(after, fake_quantize_weight(experts.down_proj))


@pytest.mark.parametrize("mode", MODES)
def test_a_sibling_that_moves_the_shared_scale_is_noticed(mode: CacheMode) -> None:
    """q's quantization depends on k's amax; growing k re-quantizes q."""
    model = prepared(mode)
    attention = model.model.layers[0].self_attn
    before = attention.q_proj.quads_weight.clone()
    attention.k_proj.weight.data[0, 0] = 4.7
    after = attention.q_proj.quads_weight
    assert not torch.equal(after, before)
    assert torch.equal(after, fake_quantize_weight(attention.q_proj.weight, amax=torch.tensor(4.6875)))


@pytest.mark.parametrize("mode", [CacheMode.DENSE, CacheMode.PACKED])
def test_micro_batches_and_recomputation_quantize_once(mode: CacheMode) -> None:
    """Within one optimizer step every weight is quantized once, gradient checkpointing included."""
    model = prepared(mode).train()
    model.gradient_checkpointing_enable()
    parameters = len(list(quantizers_of(model)))
    for seed in range(3):
        loss_of(model, seed).backward()
    assert counts(model) == (5 * parameters, parameters)  # 3 forward passes and 3 recomputations
    step(model)
    loss_of(model)
    assert counts(model)[1] == 2 * parameters


def test_cache_does_not_change_training() -> None:
    """20 optimizer steps of two micro-batches give the same losses and weights, bit for bit, in every mode."""
    results = []
    for mode in MODES:
        model = prepared(mode).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for i in range(20):
            optimizer.zero_grad()
            for micro in (2 * i, 2 * i + 1):
                loss = loss_of(model, micro)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        results.append((losses, model.model.layers[0].mlp.experts.gate_up_proj.detach()))
    assert results[0][0][0] > results[0][0][-1]
    for losses, weight in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(weight, results[0][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scoring", [torch.no_grad, torch.inference_mode])
def test_scoring_before_training(mode: CacheMode, scoring: Callable[[], AbstractContextManager[None]]) -> None:
    """Weights kept by a pass without gradients serve a training pass, whose gradients are the usual ones."""
    model, fresh = prepared(mode), prepared(CacheMode.NONE)
    with scoring():
        expected = loss_of(model)
    loss_of(fresh).backward()
    loss = loss_of(model)
    loss.backward()
    assert loss == expected
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_packed_cache_is_small_and_can_be_freed() -> None:
    """The packed cache takes 28 % of the weight's BF16 bytes; clear_cache takes them back."""
    model = prepared(CacheMode.PACKED)
    loss_of(model)
    (_, _, quantizer), *_ = [q for q in quantizers_of(model) if q[1] == "down_proj"]
    weight = model.model.layers[0].mlp.experts.down_proj
    kept = quantizer.cache.get([weight])
    assert kept is not None
    assert kept.nbytes / weight.nbytes == pytest.approx(4.5 / 16, rel=0.01)
    clear_cache(model)
    assert quantizer.cache.get([weight]) is None


@pytest.mark.parametrize("mode", [CacheMode.DENSE, CacheMode.PACKED])
def test_compiled_graphs_use_the_cache(mode: CacheMode) -> None:
    """A compiled graph quantizes once, and again after an update, and what it gets is not the kept tensor."""
    model = prepared(mode)
    experts, linear = model.model.layers[0].mlp.experts, model.model.layers[0].self_attn.q_proj

    @torch.compile(fullgraph=True, backend="aot_eager")
    def weights() -> tuple[torch.Tensor, ...]:
        return *expert_weights(experts), linear.quads_weight

    caches = [experts._quads_quantizers["down_proj"].cache, linear._quads_quantizers["weight"].cache]
    for updates in (1, 2):
        for _ in range(3):
            down = weights()[1]
            assert torch.equal(down, fake_quantize_weight(experts.down_proj))
            down.detach().zero_()
        assert [(c.hits, c.misses) for c in caches] == [(2 * updates, updates)] * 2
        step(model)
        caches[0].hits, caches[0].misses = caches[1].hits, caches[1].misses = 2 * updates, updates


def test_a_push_takes_the_packed_cache() -> None:
    """The packed form that a push takes is the kept one where there is one, and the reference's bytes always."""
    for mode in MODES:
        model = prepared(mode)
        loss_of(model)
        attention = model.model.layers[0].self_attn
        quantizer = attention.q_proj._quads_quantizers["weight"]
        amax = torch.stack([p.weight.abs().amax() for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        expected = PackedTensor.quantize(attention.q_proj.weight, amax=amax.amax().float())
        for _ in range(2):
            packed = quantizer.packed(attention.q_proj.weight)
            assert torch.equal(packed.codes, expected.codes)
            assert torch.equal(packed.decode_scale, expected.decode_scale)
        assert quantizer.cache.misses == (0 if mode is CacheMode.NONE else 1)
        with torch.no_grad():
            attention.q_proj.weight.mul_(1.7)
        assert not torch.equal(quantizer.packed(attention.q_proj.weight).block_scales, expected.block_scales)
        attention.q_proj.weight.data[0, 0] = float("nan")
        with pytest.raises(FormatError, match=r"q_proj: holds NaN"):
            quantizer.packed(attention.q_proj.weight)


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_scale_that_moves_is_noticed(mode: CacheMode) -> None:
    """Changing a frozen scale in place, or setting another one, re-quantizes."""
    model = qwen3()
    prepare_qat(model, Contract(weight_global_scale=WeightGlobalScale.FROZEN), cache=mode)
    experts = model.model.layers[0].mlp.experts
    quantizer = experts._quads_quantizers["down_proj"]
    for _ in range(2):
        assert torch.equal(
            expert_weights(experts)[1], fake_quantize_weight(experts.down_proj, amax=quantizer.frozen.clone())
        )
        quantizer.frozen.mul_(0.4)
    quantizer.frozen = quantizer.frozen * 3
    assert torch.equal(expert_weights(experts)[1], fake_quantize_weight(experts.down_proj, amax=quantizer.frozen))


@pytest.mark.parametrize(
    "change",
    [lambda w: w.roll(4, -1), lambda w: w * torch.tensor([1.0, -1.0] * 4 + [1.0] * (w.shape[-1] - 8)).to(w.dtype)],
    ids=["words moved", "signs flipped"],
)
def test_checksums_see_what_a_sum_does_not(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Words that change places within a row, and signs that are flipped in pairs, change the row's checksum."""
    weight = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert not (row_sums(weight) == row_sums(change(weight))).any()
