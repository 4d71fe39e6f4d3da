# SPDX-License-Identifier: Apache-2.0
"""The trainer on a GPU: the kernels' numbers are the CPU's, the cache is never stale, and the host never waits."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from trainer_models import ALL_LINEARS, qwen3, tokens
from trainer_models import single_thread as single_thread

from trainer_qat import CacheMode, clear_cache, prepare_qat
from trainer_qat.finite import check_finite
from trainer_qat.prepare import expert_weights, quantizers_of
from vllm_quads.kernels import kept
from vllm_quads.nvfp4 import PackedTensor, fake_quantize_weight
from vllm_quads.nvfp4.errors import FormatError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MODES = [CacheMode.NONE, CacheMode.DENSE, CacheMode.PACKED]


def prepared(mode: CacheMode, dtype: torch.dtype = torch.bfloat16, **options: object) -> nn.Module:
    """A tiny model on the GPU with all linears quantized."""
    model = qwen3(dtype=dtype).cuda()
    prepare_qat(model, ALL_LINEARS, cache=mode, **options)
    return model.train()


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """Loss of one batch."""
    ids = tokens(seed=seed).cuda()
    return model(ids, labels=ids).loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_the_reference_bit_for_bit(mode: CacheMode, dtype: torch.dtype) -> None:
    """What the model multiplies with on the GPU is what the reference computes on the CPU, at every use."""
    model = prepared(mode, dtype)
    for _ in range(3):
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for value, weight in zip(expert_weights(experts), (experts.gate_up_proj, experts.down_proj), strict=True):
                assert torch.equal(value.cpu(), fake_quantize_weight(weight.detach().cpu()))


CHANGES = {
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.5).step(),
    "fused optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True).step(),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 1.3 for k, v in m.state_dict().items()}),
    "in-place through .data": lambda m: m.model.layers[0].mlp.experts.down_proj.data.mul_(1.1),
    "one element through .data": lambda m: m.model.layers[0].mlp.experts.down_proj.data[2, 3, 4].fill_(9.0),
    ".data assignment": lambda m: setattr(
        m.model.layers[0].mlp.experts.down_proj, "data", m.model.layers[0].mlp.experts.down_proj.data * 2
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_missed(change: str, mode: CacheMode) -> None:
    """After any kind of update the forward pass uses the quantization of the weights as they are now."""
    model = prepared(mode)
    loss_of(model).backward()
    CHANGES[change](model)
    weight = model.model.layers[0].mlp.experts.down_proj
    assert torch.equal(
        expert_weights(model.model.layers[0].mlp.experts)[1].cpu(), fake_quantize_weight(weight.detach().cpu())
    )


def test_large_weights_are_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients on, an edit of one element of a large weight is noticed within 16 passes, without them at once."""
    monkeypatch.setattr(kept, "_SMALL", 0)
    model = prepared(CacheMode.DENSE)
    experts = model.model.layers[0].mlp.experts
    weight = experts.down_proj
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expert_weights(experts)
            weight.data[1, 2, 3] += 4.0
            expected = fake_quantize_weight(weight.detach().cpu())
            passes = 0
            while not torch.equal(expert_weights(experts)[1].cpu(), expected):
                passes += 1
                assert grad
                assert passes < 16


def test_cache_does_not_change_training() -> None:
    """10 optimizer steps of two micro-batches with gradient checkpointing give the same weights in every mode."""
    results = []
    for mode in MODES:
        model = prepared(mode)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for i in range(10):
            optimizer.zero_grad()
            for micro in (2 * i, 2 * i + 1):
                loss_of(model, micro).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten().float() for p in model.parameters()]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0.05, atol=0.02)


def test_micro_batches_and_recomputation_quantize_once() -> None:
    """Within one optimizer step every weight is quantized once, gradient checkpointing included."""
    model = prepared(CacheMode.PACKED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    caches = [q.cache for _, _, q in quantizers_of(model)]
    for seed in range(3):
        loss_of(model, seed).backward()
    assert [(c.hits, c.misses) for c in caches] == [(5, 1)] * len(caches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss_of(model)
    assert {c.misses for c in caches} == {2}


@pytest.mark.parametrize("mode", MODES)
def test_the_host_does_not_wait(mode: CacheMode) -> None:
    """Quantizing, checking and reusing a weight, forward and backward, synchronizes nothing."""
    model = prepared(mode, clamp_gradient=True)
    experts = model.model.layers[0].mlp.experts
    linear = model.model.layers[0].self_attn.q_proj

    def work() -> None:
        for _ in range(2):
            gate_up, down = expert_weights(experts)
            (gate_up.sum() + down.sum() + linear.quads_weight.sum()).backward()
        with torch.no_grad():
            expert_weights(experts)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expert_weights(experts)

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_clamped_gradient_is_that_of_the_cpu() -> None:
    """The clamp's mask on the GPU is the reference's."""
    grads = []
    for device in ("cpu", "cuda"):
        model = qwen3().to(device)
        prepare_qat(model, ALL_LINEARS, clamp_gradient=True)
        experts = model.model.layers[0].mlp.experts
        for quantizer in experts._quads_quantizers.values():
            quantizer.frozen = quantizer.amax(next(iter(experts.parameters()))) * 0.3
        gate_up, down = expert_weights(experts)
        (gate_up.sum() + 2 * down.sum()).backward()
        grads.append([experts.gate_up_proj.grad.cpu(), experts.down_proj.grad.cpu()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
        assert (a == 0).any()
        assert (a != 0).any()


@pytest.mark.parametrize("mode", MODES)
def test_nan_is_refused(mode: CacheMode) -> None:
    """A weight with NaN gives no finite loss, and an error that names it, at the latest when asked for."""
    check_finite()
    model = prepared(mode)
    loss_of(model)
    model.model.layers[1].mlp.experts.down_proj.data[1, 2, 3] = float("nan")

    def passes() -> None:
        for _ in range(2):
            assert not torch.isfinite(loss_of(model))
        check_finite()

    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.down_proj: holds NaN or Inf"):
        passes()


@pytest.mark.parametrize("mode", [CacheMode.DENSE, CacheMode.PACKED])
def test_compiled_graphs_use_the_cache(mode: CacheMode) -> None:
    """A compiled step quantizes once per optimizer step, follows updates, and equals the eager one."""
    model = prepared(mode)
    layer = model.model.layers[0]

    @torch.compile(fullgraph=True)
    def weights() -> tuple[torch.Tensor, ...]:
        return *expert_weights(layer.mlp.experts), layer.self_attn.k_proj.quads_weight

    cache = layer.mlp.experts._quads_quantizers["down_proj"].cache
    for step in (1, 2):
        for _ in range(3):
            values = weights()
            assert torch.equal(values[1].cpu(), fake_quantize_weight(layer.mlp.experts.down_proj.detach().cpu()))
        assert cache.misses == step
        values[1].sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_step_follows_the_weights(mode: CacheMode) -> None:
    """Replays of a CUDA graph quantize the weights as they are then, whatever the cache has kept."""
    model = prepared(mode)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        expert_weights(experts)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = expert_weights(experts)[1]
        for _ in range(2):
            experts.down_proj.data.mul_(1.37)
            graph.replay()
            assert torch.equal(captured.cpu(), fake_quantize_weight(experts.down_proj.detach().cpu()))


def test_a_push_reuses_the_packed_cache() -> None:
    """The packed weight that a push takes is the cache's own, and equals the reference."""
    model = prepared(CacheMode.PACKED)
    loss_of(model)
    experts = model.model.layers[0].mlp.experts
    quantizer = experts._quads_quantizers["down_proj"]
    packed = quantizer.packed(experts.down_proj)
    expected = PackedTensor.quantize(experts.down_proj.detach().cpu())
    assert torch.equal(packed.codes.cpu(), expected.codes)
    assert torch.equal(packed.decode_scale.cpu(), expected.decode_scale)
    assert quantizer.cache.misses == 1
    clear_cache(model)


@pytest.mark.parametrize(("mode", "share"), [(CacheMode.PACKED, 0.30), (CacheMode.DENSE, 1.05)])
def test_memory_of_the_cache(mode: CacheMode, share: float) -> None:
    """What is kept takes at most 30 % (packed) or 105 % (dequantized) of the weight's BF16 bytes."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False)).to(device="cuda", dtype=torch.bfloat16)
    from vllm_quads.nvfp4 import Contract

    prepare_qat(model, Contract(targets=("*",)), cache=mode)
    x = torch.zeros(1, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        clear_cache(model)
        before = torch.cuda.memory_allocated()
        model(x)
    assert torch.cuda.memory_allocated() - before <= share * model[0].weight.nbytes
