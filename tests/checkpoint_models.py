# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with the tensor names of real families, and tools to damage them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

H, INTER, EXPERTS, LAYERS, VOCAB = 32, 48, 4, 3, 64
Tensors = dict[str, torch.Tensor]


def _config(model_type: str, **extra: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": H,
        "num_hidden_layers": LAYERS,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **extra,
    }


def family(name: str, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """config.json and BF16 tensors of `qwen3`, `mixtral`, `deepseek` (dense first layer, shared experts), `fused`
    (transformers-5 stacks) or `dense`."""
    g = torch.Generator().manual_seed(seed)

    def w(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * 0.05).to(torch.bfloat16)

    t: Tensors = {"model.embed_tokens.weight": w(VOCAB, H)}

    def mlp(prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        for n, shape in zip(names, ((INTER, H), (INTER, H), (H, INTER)), strict=True):
            t[f"{prefix}.{n}.weight"] = w(*shape)

    for i in range(LAYERS):
        p = f"model.layers.{i}"
        t[f"{p}.input_layernorm.weight"] = w(H)
        t |= {f"{p}.self_attn.{n}_proj.weight": w(H, H) for n in "qkvo"}
        if name == "dense" or (name == "deepseek" and i == 0):
            mlp(f"{p}.mlp")
            continue
        moe = "block_sparse_moe" if name == "mixtral" else "mlp"
        t[f"{p}.{moe}.gate.weight"] = w(EXPERTS, H)
        if name == "deepseek":
            t[f"{p}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
            mlp(f"{p}.mlp.shared_experts")
        if name == "fused":
            t[f"{p}.mlp.experts.gate_up_proj"] = w(EXPERTS, 2 * INTER, H)
            t[f"{p}.mlp.experts.down_proj"] = w(EXPERTS, H, INTER)
            continue
        for e in range(EXPERTS):
            mlp(f"{p}.{moe}.experts.{e}", ("w1", "w3", "w2") if moe != "mlp" else ("gate_proj", "up_proj", "down_proj"))
    t["model.norm.weight"] = w(H)
    if name != "mixtral":
        t["lm_head.weight"] = w(VOCAB, H)
    counts = {
        "qwen3": "num_experts",
        "fused": "num_experts",
        "mixtral": "num_local_experts",
        "deepseek": "n_routed_experts",
    }
    types = {
        "qwen3": "qwen3_moe",
        "fused": "qwen3_moe",
        "mixtral": "mixtral",
        "deepseek": "deepseek_v3",
        "dense": "qwen3",
    }
    extra: dict[str, Any] = {counts[name]: EXPERTS} if name in counts else {}
    return _config(types[name], tie_word_embeddings=name == "mixtral", **extra), t


def save(path: Path, config: dict[str, Any], tensors: Tensors, shards: int = 2) -> Path:
    """Write a checkpoint directory with a tokenizer file; tensors are dealt round-robin, so siblings lie apart."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text('{"made": "up"}')
    (path / "generation_config.json").write_text("{}")
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == s}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def make(path: Path, name: str = "qwen3", shards: int = 2) -> Path:
    """A BF16 checkpoint of a family."""
    config, tensors = family(name)
    return save(path, config, tensors, shards)


def read(path: Path) -> Tensors:
    """All tensors of a checkpoint directory, read by the safetensors library alone."""
    out: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            out |= {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    return out


def edit(path: Path, change: Callable[[Tensors], None]) -> None:
    """Rewrite a single-shard checkpoint after `change` edited its tensors in place."""
    tensors = {n: t.clone() for n, t in read(path).items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, change: Callable[[dict[str, Any]], None], file: str = "config.json") -> None:
    """Rewrite a JSON file after `change` edited it in place."""
    config = json.loads((path / file).read_text())
    change(config)
    (path / file).write_text(json.dumps(config))


def header_length(path: Path) -> int:
    """Bytes of the header of a safetensors file, length field included."""
    with path.open("rb") as f:
        return 8 + int(struct.unpack("<Q", f.read(8))[0])
