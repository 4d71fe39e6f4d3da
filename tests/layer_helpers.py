# SPDX-License-Identifier: Apache-2.0
"""Quantized layers of one rank, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vllm_quads.nvfp4 import Contract
from vllm_quads.plugin.loading import PackedLoader
from vllm_quads.plugin.moe import QuadsMoEMethod

PREFIX = "model.layers.0.mlp.experts"
SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""vLLM's names of an expert's matrices."""


class Config:
    """What the methods ask of a `QuadsConfig`."""

    def __init__(self) -> None:
        self.runtimes: dict[str, Any] = {}

    def make_loader(self, layer: nn.Module, groups: Any) -> PackedLoader:
        return PackedLoader(layer, groups, str)

    def add_runtime(self, key: str, runtime: Any) -> None:
        self.runtimes[key] = runtime

    @property
    def contract(self) -> Contract:
        return Contract()


def moe_layer(
    experts: int, hidden: int, inter: int, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)
) -> tuple[Any, QuadsMoEMethod]:
    """A MoE layer of one rank on the default device: (rank, size) of tensor and of expert parallelism."""
    layer: Any = nn.Module()
    parallel = SimpleNamespace(tp_rank=tp[0], tp_size=tp[1], enable_eplb=False)
    layer.moe_config = SimpleNamespace(moe_parallel_config=parallel, has_bias=False, is_lora_enabled=False)
    layer.activation, layer.apply_router_weight_on_input = "silu", False
    layer.swiglu_limit, layer.global_num_experts = None, experts
    local = experts // ep[1]
    layer.expert_map = None
    if ep[1] > 1:
        layer.expert_map = torch.full((experts,), -1, dtype=torch.int32)
        layer.expert_map[ep[0] * local : (ep[0] + 1) * local] = torch.arange(local, dtype=torch.int32)
    method = QuadsMoEMethod.__new__(QuadsMoEMethod)
    method.config, method.prefix, method.key = Config(), PREFIX, "quads.x"  # type: ignore[assignment]
    method.num_experts, method._matrices = experts, {}
    method.create_weights(layer, local, hidden, inter // tp[1], torch.bfloat16)
    return layer, method


def load_expert(layer: Any, method: QuadsMoEMethod, expert: int, shard: str, weight: torch.Tensor) -> None:
    """One float matrix, as vLLM's loader delivers it; `shard` as in SHARDS."""
    method._load(layer.w2_weight if shard == "w2" else layer.w13_weight, weight, "", shard, expert)
