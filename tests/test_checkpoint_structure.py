# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are cut, mixed, resized or described wrongly: refused by name, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_models as models
import pytest
import torch
from checkpoint_models import Tensors

from vllm_quads.checkpoint import detect, inspect_checkpoint, quantize_checkpoint, verify_headers
from vllm_quads.nvfp4 import CheckpointError, Contract, ContractError, FormatError

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return edit


def _drop_layer(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".layers.2." in n]:
        del tensors[name]


def _add_expert(tensors: Tensors) -> None:
    tensors[GATE.replace("experts.2", "experts.4")] = tensors[GATE].clone()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3", _set(GATE, lambda t: t.to(torch.float8_e4m3fn)), rf"{GATE}: is F8_E4M3 \[48, 32\], expected F64"),
        ("qwen3", _set(QUERY, lambda t: t.to(torch.float8_e4m3fn)), f"{QUERY}: is F8_E4M3"),
        ("qwen3", _set(QUERY, lambda t: t.to(torch.int8)), f"{QUERY}: is I8"),
        ("fused", _set(STACK, lambda t: t.to(torch.float8_e4m3fn)), f"{STACK}: is F8_E4M3"),
        ("fused", _set(STACK, lambda t: t[:0].clone()), rf"{STACK}: has shape \[0, 96, 32\], without elements"),
        ("qwen3", _set(GATE, lambda t: t.flatten()), rf"{GATE}: has shape \[1536\], expected \[N, K\]"),
        ("qwen3", _set(GATE, lambda t: t[:40].clone()), r"2.gate_proj: has shape \[40, 32\], expected \[48, 32\] like"),
        ("qwen3", _set(GATE, lambda t: t[:, :16].clone()), r"2.gate_proj: has shape \[48, 16\], expected \[48, 32\]"),
        ("qwen3", _drop_layer, "layer 2: has no tensor .1 of num_hidden_layers = 3"),
        ("qwen3", _add_expert, "experts.4.gate_proj: is one too many .*config.json says 4 experts"),
    ],
)
def test_damaged_bf16_checkpoints(tmp_path: Path, family: str, change: Callable[[Tensors], None], message: str) -> None:
    """Quantizing refuses a weight of another dtype or shape, missing layers and surplus experts; inspecting says so."""
    config, tensors = models.family(family)
    change(tensors)
    src = models.save(tmp_path / "src", config, tensors)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    problems = inspect_checkpoint(src).problems
    assert len(problems) == 1
    assert pytest.raises(CheckpointError, match=message).matches(CheckpointError(problems[0]))


def test_missing_lm_head(tmp_path: Path) -> None:
    """A causal model that is not tied has an lm_head; without it an engine would serve noise."""
    config, tensors = models.family("qwen3")
    del tensors["lm_head.weight"]
    src = models.save(tmp_path / "src", config | {"architectures": ["Qwen3MoeForCausalLM"]}, tensors)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: is missing, .*tie_word_embeddings = false"):
        verify_headers(src)
    models.edit_config(src, lambda c: c.update(tie_word_embeddings=True))
    verify_headers(src)


def test_experts_without_a_gate_are_complete(tmp_path: Path) -> None:
    """Families whose experts are up and down alone lack nothing."""
    config, tensors = models.family("qwen3")
    tensors = {n: t for n, t in tensors.items() if "gate_proj" not in n}
    assert verify_headers(models.save(tmp_path / "src", config, tensors)).weights


def test_config_of_multimodal_models(tmp_path: Path) -> None:
    """Sizes below `text_config` count: a transposed stack is refused there too, and without any size as well."""
    config, tensors = models.family("fused")
    text = {key: config.pop(key) for key in ("hidden_size", "num_experts", "num_hidden_layers")}
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    src = models.save(tmp_path / "src", config | {"text_config": text}, tensors)
    assert inspect_checkpoint(src).ok  # complete, but not ours to quantize
    with pytest.raises(FormatError, match=r"mlp.experts.\w+: the fused experts have shape .*with H = 32"):
        quantize_checkpoint(src, tmp_path / "dst")
    models.edit_config(src, lambda c: c.pop("text_config"))
    with pytest.raises(FormatError, match="names no hidden_size"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_names_of_unknown_families_stay(tmp_path: Path) -> None:
    """Mixtral's names under a model_type that QUADS has never heard of are kept: the model's own code reads them."""
    config, tensors = models.family("mixtral")
    src = models.save(tmp_path / "src", config | {"model_type": "somebodys_mixtral"}, tensors)
    quantize_checkpoint(src, tmp_path / "dst")
    written = {n for n in models.read(tmp_path / "dst") if "_scale" not in n}
    assert written == set(tensors)


def test_projections_fused_on_disk_are_refused(tmp_path: Path) -> None:
    """Phi-3 style gate_up_proj and qkv_proj: no traceback, and nothing quantized with scales that nobody else uses."""
    config, tensors = models.family("dense")
    for i in range(models.LAYERS):
        mlp = f"model.layers.{i}.mlp"
        parts = [tensors.pop(f"{mlp}.{p}.weight") for p in ("gate_proj", "up_proj")]
        tensors[f"{mlp}.gate_up_proj.weight"] = torch.cat(parts)
    src = models.save(tmp_path / "src", config, tensors)
    with pytest.raises(ContractError, match=r"mlp.gate_up_proj: is gate_proj, up_proj fused into one weight"):
        quantize_checkpoint(src, tmp_path / "dst", contract=Contract(targets=("*.mlp.*_proj",)))


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("config.json", [], r"quantization_config is \[\], expected an object"),
        ("config.json", {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": [1]}, "config_groups is"),
        (
            "config.json",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"},
            "ignore is 'lm_head'",
        ),
        ("config.json", {"quant_method": "compressed-tensors", "config_groups": {"a": 5}}, "config_groups.a is 5"),
        (
            "config.json",
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
            "a.weights is 3",
        ),
        ("hf_quant_config.json", [], r"`quantization` of hf_quant_config.json is \[\]"),
        ("hf_quant_config.json", {"quant_algo": "NVFP4", "exclude_modules": [3]}, r"exclude_modules is \[3\]"),
    ],
)
def test_malformed_quantization_configs(tmp_path: Path, file: str, value: Any, message: str) -> None:
    """JSON of another shape than the format's is an error that names the key, not a traceback or a list of letters."""
    src = models.make(tmp_path / "src", shards=1)
    if file == "config.json":
        models.edit_config(src, lambda c: c.update(quantization_config=value))
    else:
        (src / file).write_text(json.dumps({"quantization": value}))
    with pytest.raises(CheckpointError, match=message):
        detect(src)


def test_ignore_list_with_a_broken_regular_expression(tmp_path: Path) -> None:
    """A `re:` entry that does not compile is named."""
    quantize_checkpoint(models.make(tmp_path / "src"), tmp_path / "q", format="compressed-tensors")
    models.edit_config(tmp_path / "q", lambda c: c["quantization_config"]["ignore"].append("re:["))
    with pytest.raises(CheckpointError, match=r"ignore holds 're:\[', which is no regular expression"):
        detect(tmp_path / "q")


def test_index_that_points_elsewhere(tmp_path: Path) -> None:
    """The index names files beside itself, as strings."""
    src = models.make(tmp_path / "src")
    for file in (5, "../other/model.safetensors"):
        models.edit_config(src, lambda c, f=file: c["weight_map"].update(x=f), "model.safetensors.index.json")
        with pytest.raises(CheckpointError, match=r"index.json: lists x in .*expected the name of a file"):
            detect(src)


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    """A checkpoint of pickles is not read; the message names the file and the way to safetensors."""
    src = models.make(tmp_path / "src", shards=1)
    torch.save(models.read(src), src / "pytorch_model.bin")
    (src / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin; convert it, .*save_pretrained"):
        detect(src)
