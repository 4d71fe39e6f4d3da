# SPDX-License-Identifier: Apache-2.0
"""Canonical weight names: one spelling for what transformers, checkpoints and vLLM call differently.

A canonical name is the module path of one 2-D weight [N, K], for example
`model.layers.3.mlp.experts.17.gate_proj` or `model.layers.3.self_attn.q_proj`. Contracts match their patterns
against these names, so trainer and rollout cannot read the same pattern differently.
"""

from __future__ import annotations

import functools
import re
from enum import Enum

from vllm_quads.nvfp4.errors import ContractError

# Wrappers that trainers put into parameter names.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# vLLM's RoutedExperts parameters, as they appear below `...experts.routed_experts.`.
_VLLM_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_FUSED_DENSE = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # multi-head latent attention (DeepSeek) in vLLM
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)$")
_STACK = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")


class Kind(str, Enum):
    """What a weight is for. Routers, embeddings and lm_head are never quantized."""

    EXPERT = "expert"
    LINEAR = "linear"
    ROUTER = "router"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    OTHER = "other"


@functools.lru_cache(maxsize=1 << 16)  # a large model's names; contracts ask for each a few dozen times
def canonical_name(name: str) -> str:
    """Canonical spelling of a weight or module name (of one matrix, or of a fused stack).

    `model.layers.0.block_sparse_moe.experts.3.w1.weight` -> `model.layers.0.mlp.experts.3.gate_proj`;
    `model.layers.0.mlp.experts.routed_experts.w13_weight` -> `model.layers.0.mlp.experts.gate_up_proj`.
    """
    name = _WRAPPERS.sub("", name)
    name = name.removesuffix(".weight").replace(".block_sparse_moe.", ".mlp.")
    name = name.replace(".experts.routed_experts", ".experts").replace(".experts.base_layer", ".experts")
    head, _, leaf = name.rpartition(".")
    if head.endswith(".experts"):
        leaf = _VLLM_EXPERTS.get(leaf, leaf)
    elif re.search(r"\.experts\.\d+$", head):
        leaf = _MIXTRAL.get(leaf, leaf)
    return f"{head}.{leaf}" if head else leaf


def is_expert_stack(name: str) -> bool:
    """True for a fused 3-D stack of experts (`...experts.gate_up_proj`, `...experts.down_proj`)."""
    return _STACK.match(canonical_name(name)) is not None


def expand(name: str, num_experts: int | None = None) -> list[str]:
    """Canonical names of the matrices that a possibly fused name stands for, in storage order.

    An expert stack gives, expert by expert, gate and up (or down); `qkv_proj` and a dense `gate_up_proj` give their
    parts; any other name gives itself. Raises ContractError for a stack without `num_experts`.
    """
    name = canonical_name(name)
    stack = _STACK.match(name)
    if stack:
        if num_experts is None:
            raise ContractError(f"{name}: the number of experts is needed to name the matrices of a fused stack")
        parts = _FUSED_EXPERTS[stack.group(2)]
        return [f"{stack.group(1)}.{e}.{part}" for e in range(num_experts) for part in parts]
    head, _, leaf = name.rpartition(".")
    if leaf in _FUSED_DENSE:
        return [f"{head}.{part}" for part in _FUSED_DENSE[leaf]]
    return [name]


def layer_index(name: str) -> int | None:
    """Index of the decoder layer, or None outside of the layers."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def expert_index(name: str) -> int | None:
    """Index of the routed expert, or None for anything else."""
    match = _EXPERT.search(canonical_name(name))
    return int(match.group(1)) if match else None


def kind_of(name: str) -> Kind:
    """What the weight of this name is for, judged by the names that transformers and vLLM use."""
    name = canonical_name(name)
    leaf = name.rpartition(".")[2]
    if _EXPERT.search(name) or _STACK.match(name):
        return Kind.EXPERT
    if leaf in ("gate", "router", "shared_expert_gate") or ".router." in name or ".gate.wg" in name:
        return Kind.ROUTER
    if leaf in ("lm_head", "output", "head") or ".lm_head." in name:  # Mistral's and an MTP layer's names
        return Kind.LM_HEAD
    if "embed" in leaf or leaf in ("wte", "wpe"):
        return Kind.EMBEDDING
    if leaf.endswith(("_proj", "_proj_with_mqa")):
        return Kind.LINEAR
    return Kind.OTHER


def scale_group(name: str) -> str:
    """Key of the siblings that share one global scale because the rollout multiplies with them as one matrix.

    Gate and up (w13) of one expert or MLP, q, k, v of one attention, and the down-projections q_a and kv_a of latent
    attention share; everything else stands alone.
    """
    head, _, leaf = canonical_name(name).rpartition(".")
    for fused, parts in _FUSED_DENSE.items():
        if leaf in parts:
            return f"{head}.{fused}"
    return f"{head}.{leaf}"


def group_members(group: str) -> tuple[str, ...]:
    """Canonical names that belong to a `scale_group` key."""
    head, _, leaf = group.rpartition(".")
    return tuple(f"{head}.{part}" for part in _FUSED_DENSE.get(leaf, (leaf,)))
