# SPDX-License-Identifier: Apache-2.0
"""prepare_qat: same numbers as really quantized weights, same parameters as the plain model, clear refusals."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch import nn
from trainer_models import ALL_LINEARS, PerExpertModel, deepseek, gpt_oss, mixtral, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import prepare_qat, qat_disabled, remove_qat
from trainer_qat.prepare import QatLinear, expert_weights
from vllm_quads.nvfp4 import (
    Contract,
    ContractError,
    FormatError,
    PackedTensor,
    WeightGlobalScale,
    fake_quantize_weight,
    weight_amax,
)

FROZEN = Contract(weight_global_scale=WeightGlobalScale.FROZEN)


def really_quantized(model: nn.Module) -> nn.Module:
    """A copy whose experts and attention hold dequantized weights, by the reference path and nothing else."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            experts, attention = layer.mlp.experts, layer.self_attn
            for stack in (experts.gate_up_proj, experts.down_proj):
                for matrix in stack:  # an expert's gate and up rows share one scale
                    matrix.copy_(fake_quantize_weight(matrix))
            qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            amax = torch.stack([weight_amax(w) for w in qkv]).amax()
            for w in qkv:
                w.copy_(fake_quantize_weight(w, amax=amax))
            attention.o_proj.weight.copy_(fake_quantize_weight(attention.o_proj.weight))
    return model


def run(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    model.zero_grad()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_forward_and_gradients_are_those_of_quantized_weights(implementation: str) -> None:
    """Loss and every gradient equal, bit for bit, those of a model that holds the quantized weights (identity STE)."""
    model = qwen3(implementation)
    expected = run(really_quantized(model))
    plain = run(model)
    prepare_qat(model, ALL_LINEARS)
    loss, grads = run(model)
    assert loss == expected[0]
    assert loss != plain[0]
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[1][name]), (name, torch.get_num_threads())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_autocast_sees_the_same_weights(implementation: str) -> None:
    """FP32 masters under autocast: loss and gradients are those of quantized weights under autocast, bit for bit."""
    model = qwen3(implementation, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(really_quantized(model))
        prepare_qat(model, ALL_LINEARS)
        loss, grads = run(model)
    assert loss == expected[0]
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[1][name]), (name, torch.get_num_threads())


def test_parameters_and_state_dict_are_those_of_the_plain_model(tmp_path: object) -> None:
    """Names, state dict and saved checkpoint do not change, so everything that loads the plain model loads ours."""
    model = qwen3()
    names, state = [n for n, _ in model.named_parameters()], list(model.state_dict())
    model.save_pretrained(f"{tmp_path}/plain")
    prepare_qat(model, ALL_LINEARS)
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == state
    model.save_pretrained(f"{tmp_path}/qat")
    for file in ("model.safetensors", "config.json"):
        with open(f"{tmp_path}/plain/{file}", "rb") as a, open(f"{tmp_path}/qat/{file}", "rb") as b:
            assert a.read() == b.read()


def test_copies_are_prepared_and_independent() -> None:
    """deepcopy and pickle keep fake quantization, and a copy's switch and cache are its own."""
    model = qwen3()
    prepare_qat(model, ALL_LINEARS)
    expected = run(model)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert run(other)[0] == expected
        with qat_disabled(other):
            assert run(other)[0] != expected
            assert run(model)[0] == expected
        with torch.no_grad():
            other.model.layers[0].mlp.experts.down_proj.mul_(2)
        assert run(other)[0] != expected
    assert run(model)[0] == expected


def test_switching_off_gives_the_plain_model_back() -> None:
    """qat_disabled scores with BF16 weights; remove_qat leaves no trace."""
    model = qwen3("batched_mm")
    plain = run(model)
    prepare_qat(model, ALL_LINEARS)
    quantized = run(model)[0]
    with qat_disabled(model):
        assert run(model)[0] == plain[0]
    assert run(model)[0] == quantized
    remove_qat(model)
    loss, grads = run(model)
    assert loss == plain[0]
    assert all(torch.equal(grads[n], g) for n, g in plain[1].items())
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert model.config._experts_implementation == "batched_mm"
    with pytest.raises(ContractError, match="no fake quantization"):
        remove_qat(model)
    prepare_qat(model, ALL_LINEARS)
    assert run(model)[0] == quantized


def test_report_says_what_and_why() -> None:
    """The report lists every quantized matrix, a reason for every other weight, and both sizes."""
    contract = Contract(targets=("*.experts.*", "*.self_attn.*"), ignore=("*.o_proj",), keep_last_layers=1)
    report = prepare_qat(qwen3(), contract)
    assert sorted(report.quantized.shapes) == sorted(
        [f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
        + [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    )
    assert report.kept["model.layers.0.self_attn.o_proj"] == "matches `ignore`"
    assert "keep_last_layers" in report.kept["model.layers.1.mlp.experts.gate_up_proj"]
    assert report.kept["model.layers.0.mlp.gate"] == "routers are never quantized"
    assert report.kept["lm_head"] == "lm_heads are never quantized"
    elements = 4 * 3 * 32 * 64 + 64 * 64 + 2 * 32 * 64
    assert (report.bytes_bf16, report.bytes_packed) == (2 * elements, elements * 9 // 16 + 4 * 15)
    assert "15 matrices" in str(report)
    logged = json.loads(json.dumps(report.to_dict()))
    assert Contract.from_dict(logged["contract"]) == contract
    assert logged["quantized"]["model.layers.0.mlp.experts.3.down_proj"] == [64, 32]
    assert (logged["kept"], logged["bytes_packed"]) == (report.kept, report.bytes_packed)


def test_layers_that_stay_in_bf16_compute_as_before() -> None:
    """A kept layer shares the config with quantized ones, and still runs the plain implementation."""
    model = qwen3()
    prepare_qat(model, Contract(keep_first_layers=1))
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert expert_weights(experts[0])[0] is experts[0].gate_up_proj
    assert not torch.equal(expert_weights(experts[1])[0], experts[1].gate_up_proj)
    assert torch.isfinite(run(model)[0])


def test_gate_and_up_share_a_scale_in_per_expert_modules() -> None:
    """Old-style experts (one Linear each): w1 and w3 quantize with their common amax, w2 with its own."""
    model = PerExpertModel()
    expert = model.model.layers[0].block_sparse_moe.experts[0]
    with torch.no_grad():
        expert.w3.weight.mul_(5.3)
    amax = torch.maximum(weight_amax(expert.w1.weight), weight_amax(expert.w3.weight))
    report = prepare_qat(model)
    assert len(report.quantized) == 12
    assert isinstance(expert.w1, QatLinear)
    assert torch.equal(expert.w1.quads_weight, fake_quantize_weight(expert.w1.weight, amax=amax))
    assert not torch.equal(expert.w1.quads_weight, fake_quantize_weight(expert.w1.weight))
    assert torch.equal(expert.w2.quads_weight, fake_quantize_weight(expert.w2.weight))


def test_router_is_not_caught_by_a_gate_pattern() -> None:
    """The router `mlp.gate` stays in BF16 under a pattern for `gate_proj`, and naming it is refused."""
    report = prepare_qat(qwen3(), Contract(targets=("*gate_proj", "*up_proj", "*down_proj")))
    assert not [n for n in report.quantized.shapes if n.endswith("mlp.gate")]
    with pytest.raises(ContractError, match=r"mlp\.gate: QUADS does not quantize a router"):
        prepare_qat(qwen3(), Contract(targets=("*.mlp.*",)))


def test_families() -> None:
    """Mixtral and DeepSeek-V3 (dense first layer, shared experts, MLA) resolve to the expected sets."""
    assert len(prepare_qat(mixtral()).quantized) == 2 * 4 * 3
    model = deepseek()
    report = prepare_qat(model, Contract(targets=("*.experts.*", "*.shared_experts.*", "*.layers.0.mlp.*_proj")))
    assert len(report.quantized) == 4 * 3 + 3 + 3
    assert torch.isfinite(run(model)[0])


def test_latent_attention_shares_the_scale_that_vllm_fuses() -> None:
    """DeepSeek's q_a and kv_a, which vLLM stores as one matrix (fused_qkv_a_proj), quantize with one global scale."""
    model = deepseek()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.kv_a_proj_with_mqa.weight.mul_(3.7)
    report = prepare_qat(model, Contract(targets=("*.self_attn.*",), ignore=("*.kv_b_proj",)))
    assert len(report.quantized) == 2 * 4
    amax = weight_amax(attention.kv_a_proj_with_mqa.weight)
    q_a = attention.q_a_proj
    assert torch.equal(q_a.quads_weight, fake_quantize_weight(q_a.weight, amax=amax))
    assert not torch.equal(q_a.quads_weight, fake_quantize_weight(q_a.weight))


def test_master_dtype_does_not_change_the_bytes() -> None:
    """An FP32 master and its BF16 copy quantize to the same numbers."""
    model = qwen3(dtype=torch.float32)
    master = model.model.layers[0].mlp.experts
    prepare_qat(model)
    fp32 = expert_weights(master)[0]
    bf16 = PackedTensor.quantize(master.gate_up_proj.to(torch.bfloat16)).dequantize()
    assert fp32.dtype == torch.float32
    assert torch.equal(fp32, bf16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    """Recomputation in the backward pass uses the same weights: same loss, same gradients."""
    model = qwen3()
    prepare_qat(model, ALL_LINEARS)
    expected = run(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, grads = run(model)
    assert loss == expected[0]
    assert all(torch.equal(grads[n], g) for n, g in expected[1].items())


def test_frozen_scales_stay(tmp_path: object) -> None:
    """Frozen: the scale of the start is kept, larger weights saturate, and the clamp gradient is zero there."""
    model = qwen3()
    prepare_qat(model, FROZEN, clamp_gradient=True)
    experts = model.model.layers[0].mlp.experts
    amax = weight_amax(experts.down_proj)
    with torch.no_grad():
        experts.down_proj[1, 0, 0] = 10 * amax[1]
    quantized = expert_weights(experts)[1]
    assert torch.equal(quantized, fake_quantize_weight(experts.down_proj, amax=amax))
    assert quantized[1, 0, 0] < 2 * amax[1]
    quantized.sum().backward()
    grad = experts.down_proj.grad
    assert grad[1, 0, 0] == 0
    assert grad[0].float().mean() > 0.8
    inside = (quantized - experts.down_proj).abs() < 0.2 * amax[:, None, None]
    assert bool((grad[inside & (experts.down_proj.abs() < 0.1 * amax[:, None, None])] == 1).all())


def test_live_scales_follow() -> None:
    """Live (the default): after a weight grew, its whole matrix is quantized with the new amax."""
    model = qwen3()
    prepare_qat(model)
    experts = model.model.layers[0].mlp.experts
    before = expert_weights(experts)[1].clone()
    with torch.no_grad():
        experts.down_proj[1, 0, 0] = 3.0
    after = expert_weights(experts)[1]
    assert torch.equal(after, fake_quantize_weight(experts.down_proj))
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1, 1:], before[1, 1:])


def test_nan_weights_are_named() -> None:
    """A diverged weight stops the forward pass with the tensor's name, instead of becoming a finite number."""
    for contract in (Contract(), FROZEN):
        model = qwen3()
        prepare_qat(model, contract)
        with torch.no_grad():
            model.model.layers[1].mlp.experts.gate_up_proj[2, 0, 0] = torch.nan
        with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: holds NaN"):
            run(model)


def test_refusals_name_the_reason() -> None:
    """Nothing matches, unknown expert layouts, odd modules, twice prepared, changed implementation."""
    with pytest.raises(ContractError, match="select no weight of this model"):
        prepare_qat(qwen3(), Contract(targets=("*.nothing",)))
    with pytest.raises(ContractError, match=r"transposed.*interleaved.*biases"):
        prepare_qat(gpt_oss())
    with pytest.raises(ContractError, match=r"experts\.1\.gate_proj: is kept in BF16 while other experts"):
        prepare_qat(qwen3(), Contract(ignore=("*.experts.1.*",)))
    with pytest.raises(ContractError, match="both or neither"), warnings.catch_warnings():
        prepare_qat(qwen3(), Contract(targets=("*.self_attn.q_proj",)))
    model = qwen3()
    prepare_qat(model)
    with pytest.raises(ContractError, match="prepared already"):
        prepare_qat(model)
    model.set_experts_implementation("eager")
    with pytest.raises(ContractError, match="switch the fake quantization off silently"):
        run(model)


def test_a_linear_with_a_forward_of_its_own_is_refused() -> None:
    """A subclass of Linear may use its weight in another way, so it is not swapped silently."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = PerExpertModel()
    model.model.layers[0].block_sparse_moe.experts[3].w2 = Scaled(32, 64, bias=False)
    with pytest.raises(ContractError, match=r"experts\.3\.down_proj: cannot be fake-quantized: Scaled has a forward"):
        prepare_qat(model)
