# SPDX-License-Identifier: Apache-2.0
"""Foreign formats that we write, as vLLM's own ModelOpt and compressed-tensors methods read them."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_models as models
import pytest

from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.nvfp4 import Contract

pytest.importorskip("vllm", reason="needs vLLM")

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _layers(family: str, kept: int) -> dict[str, bool]:
    """vLLM's module prefixes -> whether they stay in BF16 when the first `kept` layers do."""
    moe = "block_sparse_moe" if family == "mixtral" else "mlp"
    expected = {"lm_head": True, "model.layers.0.self_attn.qkv_proj": True, "model.layers.2.self_attn.o_proj": True}
    for i in range(1 if family == "deepseek" else 0, models.LAYERS):
        expected[f"model.layers.{i}.{moe}.gate"] = True
        expected[f"model.layers.{i}.{moe}.experts"] = i < kept
    if family == "deepseek":
        expected["model.layers.0.mlp.gate_up_proj"] = True
        expected["model.layers.2.mlp.shared_experts.gate_up_proj"] = True
    return expected


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek"])
def test_ignore_lists_mean_the_same_to_vllm(tmp_path: Path, family: str, kept: int) -> None:
    """Fused layers, experts, routers and lm_head: vLLM leaves exactly those unquantized that we left."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    src = models.make(tmp_path / "src", family)
    expected = _layers(family, kept)
    for fmt in ("modelopt", "compressed-tensors"):
        quantize_checkpoint(src, tmp_path / fmt, format=fmt, contract=Contract(keep_first_layers=kept))
    modelopt = [
        json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text()),
        json.loads((tmp_path / "modelopt" / "config.json").read_text())["quantization_config"],
    ]
    for data in modelopt:
        config = ModelOptNvFp4Config.from_config(data)
        config.packed_modules_mapping = FUSED
        assert {n: config.is_layer_excluded(n) for n in expected} == expected
    data = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    ignore = CompressedTensorsConfig.from_config(data).ignore
    assert {n: should_ignore_layer(n, ignore=ignore, fused_mapping=FUSED) for n in expected} == expected
