# SPDX-License-Identifier: Apache-2.0
"""From canonical and trainer-side names to the names that a family's checkpoints have on disk, one per expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.names import canonical_name, is_expert_stack
from vllm_quads.nvfp4.packed import PackedTensor

# Families whose checkpoints spell the MoE block `block_sparse_moe` with experts w1 (gate), w3 (up), w2 (down).
_BLOCK_SPARSE = {"mixtral", "phimoe", "minimax", "minimax_m2"}
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)(?=$|\.)")
_ROUTER = re.compile(r"\.mlp\.gate(?=$|\.)")
# Families whose fused stacks are [E, K, N], or interleave gate and up: their meaning is not that of [E, 2I, H].
_TRANSPOSED = {"gpt_oss", "llama4", "llama4_text"}


def disk_name(name: str, config: Mapping[str, Any]) -> str:
    """The on-disk spelling of a tensor or module name; names that are already spelled so stay as they are."""
    if str(config.get("model_type")) in _BLOCK_SPARSE:
        name = _EXPERT.sub(lambda m: f".block_sparse_moe.experts.{m[1]}.{_PARTS[m[2]]}", name)
        name = _ROUTER.sub(".block_sparse_moe.gate", name)
    return name


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """A value of config.json, or of its `text_config` (multimodal models); None if neither has it."""
    text = config.get("text_config")
    nested = text.get(key) if isinstance(text, Mapping) else None
    return config[key] if config.get(key) is not None else nested


def is_stack(name: str, dims: int) -> bool:
    """True for a fused 3-D stack of experts, whatever wrapper or suffix its name has."""
    return dims == 3 and is_expert_stack(name)


def check_stack(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> None:
    """Raise FormatError for a fused stack that is not [E, 2I, H] (gate rows first) or [E, H, I]."""
    hidden = config_value(config, "hidden_size")
    gate_up = canonical_name(name).endswith(".gate_up_proj")
    axis = 2 if gate_up else 1
    if hidden is None:
        raise FormatError(f"{name}: config.json names no hidden_size, so the axes of the fused experts cannot be told")
    if str(config.get("model_type")) in _TRANSPOSED or 0 in shape or shape[axis] != hidden:
        raise FormatError(
            f"{name}: the fused experts have shape {list(shape)} (model_type {config.get('model_type')!r}), expected "
            f"{'[E, 2I, H]' if gate_up else '[E, H, I]'} with H = {hidden}; save the model with one tensor per expert"
        )


def unstack(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Canonical module names and matrices [N, K] of a fused stack: gate and up (or down) of each expert."""
    head, _, leaf = canonical_name(name).rpartition(".")
    for e, matrix in enumerate(tensor):
        if leaf == "down_proj":
            yield f"{head}.{e}.down_proj", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{head}.{e}.gate_proj", gate
            yield f"{head}.{e}.up_proj", up


def unstack_packed(name: str, packed: PackedTensor) -> Iterator[tuple[str, PackedTensor]]:
    """`unstack` of a packed stack [E, N, K]; gate and up keep the scale that they share."""
    scales = dict(unstack(name, packed.block_scales))
    for module, codes in unstack(name, packed.codes):
        expert = int(module.split(".")[-2])
        yield module, PackedTensor(codes, scales[module], packed.decode_scale[expert], module)
