# SPDX-License-Identifier: Apache-2.0
"""The engines that `quads bench serve` compares, and the checkpoint directories they start from. Pure configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_quads.nvfp4.errors import QuadsError

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}
"""The published configuration, without tokenizer ids."""
FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
MODELOPT_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*.mlp.gate"],
}


@dataclass(frozen=True)
class Engine:
    """One engine: how it is started and in which form its checkpoint is."""

    name: str
    label: str
    quantization_config: dict[str, Any] | None = None
    """Part of config.json."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of vllm.LLM."""
    form: str = "bf16"
    """In which form a random checkpoint is generated for it: bf16, fp8-block or nvfp4."""


ENGINES = {
    e.name: e
    for e in (
        Engine("bf16", "BF16"),
        Engine("fp8", "FP8 per tensor (online, experts and attention)", arguments={"quantization": "fp8"}),
        Engine("fp8-block", "FP8 128×128 block (experts and attention)", FP8_BLOCK, form="fp8-block"),
        Engine("marlin", "NVFP4 W4A16, Marlin (experts and attention)", MODELOPT_NVFP4, form="nvfp4"),
        Engine("quads", "QUADS, default contract (experts; attention BF16)", arguments={"quantization": "quads"}),
        Engine(
            "quads-plain",
            "QUADS, plain W4A4 (experts; attention BF16)",
            arguments={
                "quantization": "quads",
                "additional_config": {
                    "quads": {
                        "activation": {"block_scale_rule": "max_to_six", "centering": "none"},
                        "compensation": {"form": "none"},
                    }
                },
            },
        ),
    )
}
DEFAULT_ENGINES = ("bf16", "fp8-block", "marlin", "quads")
BASELINE = "fp8-block"
"""What the table's ratios are taken against."""


def engine_named(name: str) -> Engine:
    """An engine of `ENGINES`. Raises QuadsError naming those that exist."""
    if name not in ENGINES:
        raise QuadsError(f"--engines: {name!r} is not one of {', '.join(ENGINES)}")
    return ENGINES[name]


def model_config(engine: Engine, layers: int) -> dict[str, Any]:
    """config.json of a Qwen3-30B-A3B with `layers` decoder layers."""
    if layers < 1:
        raise QuadsError(f"--layers: is {layers}, expected 1 or more")
    config = QWEN3_30B_A3B | {"num_hidden_layers": layers}
    if engine.quantization_config is not None:
        quantization = dict(engine.quantization_config)
        if engine.form == "fp8-block":  # what the published FP8 checkpoint keeps in BF16 as well
            routers = [f"model.layers.{i}.mlp.gate" for i in range(layers)]
            quantization["modules_to_not_convert"] = ["lm_head", *routers]
        config = config | {"quantization_config": quantization}
    return config


def write_model(directory: Path, engine: Engine, layers: int) -> Path:
    """A checkpoint directory with a config and no weights; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(engine, layers), indent=1))
    return directory


def weight_gib(engine: Engine, layers: int) -> float:
    """About how much memory the weights take, in GiB: enough to plan which engines fit on a card together."""
    c = QWEN3_30B_A3B
    hidden, head = int(c["hidden_size"]), int(c["head_dim"])
    attention = hidden * head * 2 * (int(c["num_attention_heads"]) + int(c["num_key_value_heads"]))
    experts = int(c["num_experts"]) * 3 * hidden * int(c["moe_intermediate_size"])
    bits = {"bf16": (16.0, 16.0), "fp8-block": (8.0, 8.0), "nvfp4": (4.5, 4.5)}[engine.form]
    if engine.arguments.get("quantization") == "fp8":
        bits = (8.0, 8.0)
    elif engine.arguments.get("quantization") == "quads":
        bits = (16.0, 4.5)
    embeddings = 2 * 16.0 * int(c["vocab_size"]) * hidden
    return (layers * (attention * bits[0] + experts * bits[1]) + embeddings) / 8 / 2**30


def groups_that_fit(names: Sequence[str], layers: int, each_gib: float, card_gib: float) -> list[list[str]]:
    """Engines that can be on the card together, the smallest first (so that QUADS and FP8 come to share a group).

    `each_gib` is what an engine needs beside its weights.
    """
    groups: list[list[str]] = []
    free: list[float] = []
    for name in sorted(names, key=lambda n: weight_gib(engine_named(n), layers)):
        need = weight_gib(engine_named(name), layers) + each_gib
        place = next((i for i, room in enumerate(free) if room >= need), None)
        if place is None:
            groups.append([])
            free.append(card_gib)
            place = len(free) - 1
        groups[place].append(name)
        free[place] -= need
    return groups


def kv_bytes_per_token(layers: int) -> int:
    """Bytes of keys and values of one token, in BF16, over all layers."""
    c = QWEN3_30B_A3B
    return 2 * 2 * layers * int(c["num_key_value_heads"]) * int(c["head_dim"])
