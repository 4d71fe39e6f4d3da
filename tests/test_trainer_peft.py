# SPDX-License-Identifier: Apache-2.0
"""PEFT: LoRA beside quantized experts reaches the rollout merged; adapters on quantized weights are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from torch import nn
from trainer_models import qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import RolloutSync, export_checkpoint, prepare_qat, probe_layers, sensitivities
from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.nvfp4 import Contract, ContractError

peft = pytest.importorskip("peft", reason="needs peft")


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """LoRA with updates that are not zero."""
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False} | options)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("first", ["prepare", "peft"])
def test_lora_beside_quantized_experts(first: str, tmp_path: Path) -> None:
    """Training moves the adapters only; push and export send base + update under plain names, as PEFT merges them."""
    torch.manual_seed(0)
    model = qwen3()
    if first == "prepare":
        report = prepare_qat(model)
        adapted = with_lora(model)
    else:
        adapted = with_lora(model)
        report = prepare_qat(adapted)
    assert report.quantized.shapes == prepare_qat(qwen3()).quantized.shapes
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    experts = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    loss = adapted(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    optimizer.step()
    assert adapted(input_ids=tokens(), labels=tokens()).loss < loss
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, experts)

    engine = FakeEngine(Contract(), report.quantized)
    pushed = RolloutSync(adapted, engine).push()
    assert export_checkpoint(adapted, tmp_path / "out").fingerprint == pushed.fingerprint
    assert probe_layers(adapted, tokens()).rows[0].isolated > 0
    assert "model.layers.0.mlp.experts.w13" in sensitivities(adapted, [[1, 2]], [[3, 4]])
    plain = adapted.merge_and_unload()
    plain.save_pretrained(tmp_path / "merged")
    want = quantize_checkpoint(tmp_path / "merged", tmp_path / "quantized", contract=Contract())
    assert want.fingerprint == pushed.fingerprint
    state = plain.state_dict()
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"model.layers.1.self_attn.{name}.weight"
        assert torch.equal(engine.serving[key], state[key])
    assert not [n for n in engine.serving if "lora" in n or "base_layer" in n]


def test_adapters_on_quantized_weights_are_refused() -> None:
    """On a linear or on fused experts, before or after prepare_qat: the weight is named, and what to do."""
    contract = Contract(targets=("*.self_attn.*_proj",))
    message = r"q_proj: cannot be fake-quantized: it carries a PEFT adapter.*merge_and_unload"
    with pytest.raises(ContractError, match=message):
        prepare_qat(with_lora(qwen3()), contract)
    with pytest.raises(
        ContractError, match=r"experts\.gate_up_proj: cannot be fake-quantized: it carries a PEFT adapter"
    ):
        prepare_qat(with_lora(qwen3(), target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]))
    model = qwen3()
    prepare_qat(model, contract)
    with pytest.raises(ContractError, match=r"q_proj: is quantized, but it carries a PEFT adapter"):
        RolloutSync(with_lora(model), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"self_attn.q_proj: carries DoRA; QUADS merges plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "lm_head: carries a PEFT utils.other.ModulesToSaveWrapper"),
    ],
)
def test_adapters_that_are_not_plain_lora_are_not_pushed(options: dict[str, Any], message: str) -> None:
    """They would reach the rollout half."""
    model = with_lora(qwen3(), **options)
    prepare_qat(model)
    with pytest.raises(ContractError, match=message):
        RolloutSync(model, None)


def test_learned_prompts_are_refused() -> None:
    """They are in no weight that a push sends: before and after prepare_qat."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ContractError, match=r"PEFT adapter 'default' \(PROMPT_TUNING\) learns a prompt"):
        prepare_qat(peft.get_peft_model(qwen3(), config))
    model = qwen3()
    prepare_qat(model)
    with pytest.raises(ContractError, match="learns a prompt, which no pushed weight holds"):
        RolloutSync(peft.get_peft_model(model, config), None)


def test_a_merged_or_disabled_adapter_is_not_added_again() -> None:
    """What the forward pass does not add, a push does not either."""
    model = with_lora(qwen3())
    prepare_qat(model)
    engine = FakeEngine(Contract(), prepare_qat(qwen3()).quantized)
    sync = RolloutSync(model, engine)
    key = "model.layers.0.self_attn.q_proj.weight"
    sync.push()
    active = engine.serving[key]
    model.merge_adapter()
    sync.push()
    assert torch.equal(engine.serving[key], active)
    model.unmerge_adapter()
    with model.disable_adapter():
        sync.push()
    assert not torch.equal(engine.serving[key], active)
