# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm_quads.nvfp4 import Contract

ALL_LINEARS = Contract(targets=("*.experts.*", "*.self_attn.*_proj"))
"""Routed experts and attention."""
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tiny matrices run faster on one thread, and FSDP2's ranks use one, so that sums have one order.

    The flag makes the gradient of gathered weights (batched_mm) add up in that order too, instead of atomically.
    """
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(before)


def qwen3(
    implementation: str = "grouped_mm", dtype: torch.dtype = torch.bfloat16, **options: object
) -> PreTrainedModel:
    """Qwen3-MoE with 4 experts, top-2."""
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sizes, head_dim=16, **options)).to(dtype)
    model.set_experts_implementation(implementation)
    return model.eval()


def mixtral() -> PreTrainedModel:
    """Mixtral with 4 experts and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return MixtralForCausalLM(MixtralConfig(**SHAPE, **sizes, tie_word_embeddings=True)).to(torch.bfloat16).eval()


def deepseek(**other: Any) -> PreTrainedModel:
    """DeepSeek-V3 with a dense first layer, shared experts and a score-correction buffer; `other` sizes on request."""
    torch.manual_seed(0)
    sizes = SHAPE | {
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | other)).to(torch.bfloat16).eval()


def gpt_oss() -> PreTrainedModel:
    """GPT-OSS: experts transposed, interleaved and with biases."""
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    return GptOssForCausalLM(config).to(torch.bfloat16).eval()


class Expert(nn.Module):
    """One expert of older and remote-code models: three Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.w2 = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A MoE block of per-expert modules, names as in the old Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Top-2 of 4."""
        weight, index = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (index == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
        return out


class PerExpertModel(nn.Module):
    """A causal language model without attention whose experts are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(128, 64)
        layer = nn.Module()
        layer.block_sparse_moe = Block()
        self.model.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(64, 128, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """As Hugging Face models have it."""
        return self.model.embed_tokens

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: object
    ) -> SimpleNamespace:
        """Logits only."""
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        flat = x.flatten(0, 1)
        y = flat + self.model.layers[0].block_sparse_moe(flat)
        return SimpleNamespace(logits=self.lm_head(y).view(*x.shape[:2], -1))


def tokens(rows: int = 2, columns: int = 12, seed: int = 1) -> Tensor:
    """Random token ids int64 [rows, columns]."""
    return torch.randint(0, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))
