# SPDX-License-Identifier: Apache-2.0
"""Canonical names: one spelling for what checkpoints, trainers and vLLM call differently."""

from __future__ import annotations

import pytest

from vllm_quads.nvfp4 import ContractError, Kind, canonical_name, expand, kind_of, scale_group
from vllm_quads.nvfp4.names import expert_index, group_members, is_expert_stack, layer_index

EXPERT = "model.layers.3.mlp.experts.17."


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", EXPERT + "gate_proj"),  # Qwen3-MoE, DeepSeek
        ("model.layers.3.block_sparse_moe.experts.17.w1.weight", EXPERT + "gate_proj"),  # Mixtral
        ("model.layers.3.block_sparse_moe.experts.17.w3.weight", EXPERT + "up_proj"),
        ("model.layers.3.block_sparse_moe.experts.17.w2", EXPERT + "down_proj"),
        ("model.layers.3.block_sparse_moe.gate.weight", "model.layers.3.mlp.gate"),
        ("model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.gate_up_proj"),  # transformers 5
        ("model.layers.3.mlp.experts.w13_weight", "model.layers.3.mlp.experts.gate_up_proj"),  # vLLM
        ("model.layers.3.mlp.experts.routed_experts.w13_weight", "model.layers.3.mlp.experts.gate_up_proj"),
        ("model.layers.3.mlp.experts.routed_experts.w2_weight", "model.layers.3.mlp.experts.down_proj"),
        ("model.layers.3.mlp.experts.base_layer.w2_weight", "model.layers.3.mlp.experts.down_proj"),
        ("module.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate"),  # DDP
        ("_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.mlp.gate.weight", "model.layers.3.mlp.gate"),
        ("model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.gate.weight", "model.layers.3.mlp.gate"),
        ("_orig_mod.module.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate"),
        ("model.layers.3._checkpoint_wrapped_module.mlp.experts.17.w1.weight", EXPERT + "gate_proj"),
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj"),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", "model.layers.3.mlp.shared_experts.gate_proj"),
        ("lm_head.weight", "lm_head"),
        ("lm_head", "lm_head"),
        ("model.submodule.w.weight", "model.submodule.w"),  # "module" only as a whole component
    ],
)
def test_spellings_meet(name: str, canonical: str) -> None:
    """Every spelling of a weight leads to the same canonical name, and that name to itself."""
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (EXPERT + "gate_proj", Kind.EXPERT),
        ("model.layers.3.mlp.experts.gate_up_proj", Kind.EXPERT),
        ("model.layers.3.block_sparse_moe.experts.1.w1.weight", Kind.EXPERT),
        ("model.layers.3.mlp.gate", Kind.ROUTER),
        ("model.layers.3.block_sparse_moe.gate", Kind.ROUTER),
        ("model.layers.3.mlp.router", Kind.ROUTER),
        ("model.layers.3.feed_forward.router.layer", Kind.ROUTER),
        ("model.layers.3.mlp.shared_expert_gate", Kind.ROUTER),
        ("model.layers.3.mlp.shared_expert.gate_proj", Kind.LINEAR),
        ("model.layers.3.mlp.gate_proj", Kind.LINEAR),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", Kind.LINEAR),
        ("model.embed_tokens", Kind.EMBEDDING),
        ("bert.embeddings.word_embeddings", Kind.EMBEDDING),
        ("transformer.wte", Kind.EMBEDDING),
        ("lm_head", Kind.LM_HEAD),
        ("language_model.lm_head.weight", Kind.LM_HEAD),
        ("output.weight", Kind.LM_HEAD),
        ("model.layers.61.shared_head.head", Kind.LM_HEAD),
        ("model.layers.3.conv", Kind.OTHER),
    ],
)
def test_kinds(name: str, kind: Kind) -> None:
    """Routers, embeddings and lm_head are recognised whatever the family calls them; gate_proj is not a router."""
    assert kind_of(name) is kind


def test_expand_names_the_matrices_of_fused_tensors() -> None:
    """Stacks expand expert by expert with gate before up; qkv and dense gate_up into their parts."""
    assert expand("model.layers.0.mlp.experts.w13_weight", 2) == [
        f"model.layers.0.mlp.experts.{e}.{p}" for e in (0, 1) for p in ("gate_proj", "up_proj")
    ]
    assert expand("a.mlp.experts.down_proj", 1) == ["a.mlp.experts.0.down_proj"]
    assert expand("a.self_attn.qkv_proj.weight") == [f"a.self_attn.{p}_proj" for p in "qkv"]
    assert expand("a.mlp.gate_up_proj") == ["a.mlp.gate_proj", "a.mlp.up_proj"]
    assert expand("a.mlp.down_proj.weight") == ["a.mlp.down_proj"]
    with pytest.raises(ContractError, match="number of experts"):
        expand("a.mlp.experts.down_proj")
    assert is_expert_stack("a.mlp.experts.down_proj")
    assert not is_expert_stack("a.mlp.shared_experts.down_proj")


def test_scale_groups_are_what_the_rollout_multiplies_as_one() -> None:
    """gate/up of one expert, q/k/v of one attention, and q_a/kv_a of latent attention share; nothing else does."""
    assert scale_group("m.block_sparse_moe.experts.1.w1") == scale_group("m.mlp.experts.1.up_proj.weight")
    assert scale_group(EXPERT + "down_proj") == EXPERT + "down_proj"
    assert scale_group(EXPERT + "gate_proj") != scale_group("model.layers.3.mlp.experts.18.gate_proj")
    assert group_members(scale_group("a.self_attn.k_proj")) == tuple(f"a.self_attn.{p}_proj" for p in "qkv")
    assert group_members(scale_group("a.self_attn.o_proj")) == ("a.self_attn.o_proj",)
    latent = expand("a.self_attn.fused_qkv_a_proj")
    assert latent == ["a.self_attn.q_a_proj", "a.self_attn.kv_a_proj_with_mqa"]
    assert {scale_group(n) for n in latent} == {"a.self_attn.fused_qkv_a_proj"}


def test_indices() -> None:
    """Layer and expert numbers come out of any spelling."""
    assert layer_index(EXPERT + "up_proj") == 3
    assert layer_index("lm_head") is None
    assert expert_index("model.layers.3.block_sparse_moe.experts.17.w3.weight") == 17
    assert expert_index("model.layers.3.mlp.shared_experts.up_proj") is None
