# SPDX-License-Identifier: Apache-2.0
"""The engines that `quads bench serve` compares, and the checkpoint directories they start from. Pure configuration."""

from __future__ import annotations

import json
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


def kv_bytes_per_token(layers: int) -> int:
    """Bytes of keys and values of one token, in BF16, over all layers."""
    c = QWEN3_30B_A3B
    return 2 * 2 * layers * int(c["num_key_value_heads"]) * int(c["head_dim"])
