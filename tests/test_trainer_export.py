# SPDX-License-Identifier: Apache-2.0
"""export_checkpoint: the same bytes as quantizing the saved BF16 checkpoint, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from trainer_models import ALL_LINEARS, PerExpertModel, deepseek, mixtral, qwen3, single_thread  # noqa: F401

from trainer_qat import export_checkpoint, prepare_qat, remove_qat
from trainer_qat.prepare import FROZEN_FILE, expert_weights
from vllm_quads.checkpoint import (
    CheckpointReader,
    fingerprint_checkpoint,
    load_packed,
    quantize_checkpoint,
    verify_headers,
)
from vllm_quads.compensation import CompensationState, SiteState
from vllm_quads.nvfp4 import CheckpointError, Contract, ContractError, FormatError, MismatchError, WeightGlobalScale


@pytest.mark.parametrize("make", [qwen3, mixtral, deepseek])
def test_export_equals_quantizing_the_saved_model(make: object, tmp_path: Path) -> None:
    """save_pretrained + `quads quantize` and export_checkpoint give the same tensors, bit for bit."""
    model = make()  # type: ignore[operator]
    contract = Contract() if make is deepseek else ALL_LINEARS
    model.save_pretrained(tmp_path / "bf16")
    prepare_qat(model, contract)
    report = export_checkpoint(model, tmp_path / "export", max_shard_bytes=50_000)
    other = quantize_checkpoint(tmp_path / "bf16", tmp_path / "quantized", contract=contract)
    assert report.fingerprint == other.fingerprint == fingerprint_checkpoint(tmp_path / "export")
    assert report.quantized == other.quantized
    verify_headers(tmp_path / "export")
    with CheckpointReader(tmp_path / "export") as a, CheckpointReader(tmp_path / "quantized") as b:
        assert sorted(a.names) == sorted(b.names)
        for name in a.names:
            left, right = a.get(name), b.get(name)
            assert (left.dtype, left.shape) == (right.dtype, right.shape), name
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), name
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1


def test_one_weight_all_the_way(tmp_path: Path) -> None:
    """What the trainer multiplies with is what the checkpoint's bytes decode to, for a gate, an up and a down row."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model)
    export_checkpoint(model, tmp_path / "out")
    gate_up, down = expert_weights(model.model.layers[1].mlp.experts)
    for expert in range(4):
        base = f"model.layers.1.mlp.experts.{expert}"
        gate, up = gate_up[expert].chunk(2)
        for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
            assert torch.equal(load_packed(tmp_path / "out", f"{base}.{part}").dequantize(), weight)


def test_config_and_side_files(tmp_path: Path) -> None:
    """config.json is the plain model's plus the contract; tokenizer files and compensation state come along."""
    model = mixtral()
    prepare_qat(model)
    base = tmp_path / "base"
    model.save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    state = CompensationState({"model.layers.0.mlp.experts.w13": SiteState.empty(64)}, {})
    export_checkpoint(model, tmp_path / "out", tokenizer=base, compensation=state)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    plain = json.loads((base / "config.json").read_text())
    assert Contract.from_dict(config.pop("quantization_config")) == Contract()
    assert config == plain
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    loaded = CompensationState.load(tmp_path / "out")
    assert loaded is not None
    assert loaded.fingerprint() == state.fingerprint()


def test_unprepared_models_export_with_a_contract(tmp_path: Path) -> None:
    """A plain model plus a contract gives what the prepared one gives; another contract than trained is refused."""
    model = qwen3()
    plain = export_checkpoint(model, tmp_path / "plain", ALL_LINEARS)
    prepare_qat(model, ALL_LINEARS)
    assert export_checkpoint(model, tmp_path / "prepared").fingerprint == plain.fingerprint
    with pytest.raises(MismatchError, match="targets"):
        export_checkpoint(model, tmp_path / "other", Contract())
    assert not (tmp_path / "other").exists()


def test_frozen_scales_are_saved_and_taken_up_again(tmp_path: Path) -> None:
    """A run that resumes from an export with frozen_from quantizes with the first run's scales."""
    contract = Contract(targets=ALL_LINEARS.targets, weight_global_scale=WeightGlobalScale.FROZEN)
    model = qwen3()
    prepare_qat(model, contract)
    grown = {k: v * 1.7 for k, v in model.state_dict().items()}
    model.load_state_dict(grown)
    first = export_checkpoint(model, tmp_path / "first")
    assert (tmp_path / "first" / FROZEN_FILE).is_file()

    resumed = qwen3()
    resumed.load_state_dict(grown)
    fresh = export_checkpoint(resumed, tmp_path / "fresh", contract)
    prepare_qat(resumed, contract, frozen_from=tmp_path / "first")
    assert export_checkpoint(resumed, tmp_path / "second").fingerprint == first.fingerprint != fresh.fingerprint


def test_nothing_appears_when_the_export_fails(tmp_path: Path) -> None:
    """A NaN weight stops the export with its name and leaves no directory; an existing one is not overwritten."""
    model = qwen3()
    prepare_qat(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = torch.nan
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts"):
        export_checkpoint(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        export_checkpoint(qwen3(), tmp_path / "out", Contract())


def test_wrapped_models_export_under_plain_names(tmp_path: Path) -> None:
    """torch.compile and checkpoint wrappers leave no trace in names."""
    model = qwen3()
    expected = export_checkpoint(model, tmp_path / "plain", Contract()).fingerprint
    prepare_qat(model)
    wrapped = torch.compile(model)
    assert isinstance(wrapped, nn.Module)
    assert export_checkpoint(wrapped, tmp_path / "wrapped").fingerprint == expected
    remove_qat(wrapped)
    with pytest.raises(ContractError, match="no Hugging Face config"):
        export_checkpoint(PerExpertModel(), tmp_path / "none", Contract())
