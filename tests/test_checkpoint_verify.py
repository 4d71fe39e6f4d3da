# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: one clear error each, from headers where headers show it, else from `inspect_checkpoint`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_models as models
import pytest
import torch

from vllm_quads.checkpoint import detect, inspect_checkpoint, load_packed, quantize_checkpoint, verify_headers
from vllm_quads.nvfp4 import CheckpointError, ContractError, FormatError

FORMATS = ["quads", "modelopt", "compressed-tensors"]
MODULE = "model.layers.0.mlp.experts.1.up_proj"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in each format, made once."""
    root = tmp_path_factory.mktemp("pristine")
    models.make(root / "bf16", shards=1)
    for fmt in FORMATS:
        quantize_checkpoint(root / "bf16", root / fmt, format=fmt)
    return root


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a pristine checkpoint that a test may damage."""
    return lambda fmt: Path(shutil.copytree(pristine / fmt, tmp_path / fmt))


def _names(fmt: str) -> tuple[str, str]:
    return ("weight_packed", "weight_global_scale") if fmt == "compressed-tensors" else ("weight", "weight_scale_2")


def _replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[models.Tensors], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


@pytest.mark.parametrize("fmt", [*FORMATS, "bf16"])
def test_intact_checkpoints_pass(copy: Callable[[str], Path], fmt: str) -> None:
    """No false alarm on any format; detect agrees with the name."""
    path = copy(fmt)
    assert verify_headers(path).format.value == fmt
    assert inspect_checkpoint(path).problems == []


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("part", ["weight_scale", "global"])
def test_missing_scale_tensor(copy: Callable[[str], Path], fmt: str, part: str) -> None:
    """Codes without their block scales or global scale: the missing tensor is named."""
    path, codes, name = copy(fmt), *_names(fmt)
    missing = f"{MODULE}.{name if part == 'global' else part}"
    models.edit(path, lambda t: t.pop(missing))
    with pytest.raises(CheckpointError, match=f"{missing}: is missing, but {MODULE}.{codes} is packed"):
        verify_headers(path)


@pytest.mark.parametrize("fmt", [*FORMATS, "bf16"])
def test_extra_scale_tensor(copy: Callable[[str], Path], fmt: str) -> None:
    """A scale tensor with no packed weight beside it (a lost weight, or another format's tensor) is named."""
    path, stray = copy(fmt), "model.layers.0.self_attn.q_proj.weight_scale"
    models.edit(path, lambda t: t.update({stray: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"{stray}: is a scale tensor without a packed weight"):
        verify_headers(path)


def test_scale_of_the_other_format(copy: Callable[[str], Path]) -> None:
    """A quads checkpoint that also holds weight_global_scale mixes formats: which scale is true cannot be known."""
    path = copy("quads")
    models.edit(path, lambda t: t.update({f"{MODULE}.weight_global_scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"{MODULE}.weight_global_scale: is a scale tensor without"):
        verify_headers(path)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight", lambda t: t.view(torch.int8), r"weight: is I8 \[48, 16\], expected U8"),
        ("weight", lambda t: t.unsqueeze(0), r"weight: packed codes have shape \[1, 48, 16\], expected \[N, K/2\]"),
        ("weight", lambda t: t[:, :12].contiguous(), "weight: K = 24 is not a multiple of 16"),
        ("weight", lambda t: t[:-1].contiguous(), r"weight_scale: has shape \[48, 2\], expected \[47, 2\]"),
        ("weight_scale", lambda t: t.float(), "weight_scale: is F32, expected F8_E4M3"),
        ("weight_scale", lambda t: t.view(torch.uint8), "weight_scale: is U8, expected F8_E4M3"),
        ("weight_scale", lambda t: t.T.contiguous(), r"weight_scale: has shape \[2, 48\], expected \[48, 2\]"),
        ("weight_scale_2", lambda t: t.to(torch.bfloat16), "weight_scale_2: is BF16, expected F32"),
        ("weight_scale_2", lambda t: t.repeat(2), r"weight_scale_2: has shape \[2\], expected \[\]"),
    ],
)
def test_wrong_dtype_or_shape(
    copy: Callable[[str], Path], suffix: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """The tensor, what it is and what was expected; from headers alone."""
    path = copy("quads")
    models.edit(path, _replace(f"{MODULE}.{suffix}", change))
    with pytest.raises(CheckpointError, match=f"{MODULE}.{message}"):
        verify_headers(path)
    assert any(MODULE in p for p in inspect_checkpoint(path).problems)


@pytest.mark.parametrize("cut", ["nothing left", "header", "data", "trailing"])
def test_truncated_shard(copy: Callable[[str], Path], cut: str) -> None:
    """A shard that ends early (or goes on after its end) is named with both sizes, and never read."""
    path = copy("quads")
    shard = path / "model.safetensors"
    data, header = shard.read_bytes(), models.header_length(shard)
    size = {"nothing left": 4, "header": header - 10, "data": len(data) - 100, "trailing": len(data)}[cut]
    shard.write_bytes(data[:size] + (b"xx" if cut == "trailing" else b""))
    with pytest.raises(CheckpointError, match=r"model.safetensors: (is truncated|has bytes after)"):
        verify_headers(path)


def test_files_that_are_no_checkpoint(tmp_path: Path, copy: Callable[[str], Path]) -> None:
    """No directory, no config, broken JSON, no weights, not safetensors: each says which path and what it is."""
    with pytest.raises(CheckpointError, match="nowhere: is not a directory"):
        detect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        detect(tmp_path / "empty")
    path = copy("quads")
    (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not really json!")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        detect(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        detect(path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: is not valid JSON"):
        detect(path)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    """A missing shard file, and an index that lists a tensor which its shard lacks."""
    path = models.make(tmp_path / "m", shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="lists ghost.weight in model-00001-of-00002.safetensors"):
        verify_headers(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: cannot be read"):
        verify_headers(path)


@pytest.mark.parametrize("fmt", FORMATS)
def test_missing_expert(copy: Callable[[str], Path], fmt: str) -> None:
    """One expert matrix lost entirely, scales and all."""
    path = copy(fmt)

    def drop(tensors: models.Tensors) -> None:
        for name in [n for n in tensors if n.startswith(MODULE + ".")]:
            del tensors[name]

    models.edit(path, drop)
    with pytest.raises(CheckpointError, match=f"{MODULE}: is missing"):
        verify_headers(path)


def test_contract_and_tensors_that_differ(copy: Callable[[str], Path]) -> None:
    """The stored contract selects more, or less, than what is packed: the first difference is named."""
    path = copy("quads")
    models.edit_config(path, lambda c: c["quantization_config"].update(targets=["*.experts.*", "*.self_attn.*"]))
    message = r"k_proj is quantized by the contract but not by the checkpoint"
    with pytest.raises(CheckpointError, match=message):
        verify_headers(path)
    models.edit_config(path, lambda c: c["quantization_config"].update(targets=["*.experts.*"], keep_first_layers=1))
    with pytest.raises(CheckpointError, match=r"down_proj is quantized by the checkpoint but not by the contract"):
        verify_headers(path)
    models.edit_config(path, lambda c: c["quantization_config"].update(targets=["*.nothing"], keep_first_layers=0))
    with pytest.raises(ContractError, match="select no weight"):
        verify_headers(path)


@pytest.mark.parametrize("fmt", ["modelopt", "compressed-tensors"])
def test_ignore_list_and_tensors_that_differ(copy: Callable[[str], Path], fmt: str) -> None:
    """A packed weight that the ignore list excludes, and a BF16 linear that it does not name."""
    path = copy(fmt)

    def set_ignore(ignore: list[str]) -> None:
        models.edit_config(path, lambda c: c["quantization_config"].update(ignore=ignore))
        if fmt == "modelopt":
            models.edit_config(path, lambda c: c["quantization"].update(exclude_modules=ignore), "hf_quant_config.json")

    set_ignore(["lm_head", "model.layers.0.mlp", "re:.*self_attn.*"])
    with pytest.raises(CheckpointError, match=r"is packed, but the ignore list excludes it \('model.layers.0.mlp'\)"):
        verify_headers(path)
    set_ignore(["lm_head"])
    with pytest.raises(CheckpointError, match=r"self_attn.k_proj: is not packed, but the ignore list does not name it"):
        verify_headers(path)


def test_foreign_targets_that_are_patterns(copy: Callable[[str], Path]) -> None:
    """compressed-tensors targets may name modules instead of the class Linear: the rest need not be ignored."""
    path = copy("compressed-tensors")

    def targets(config: dict[str, Any]) -> None:
        config["quantization_config"].update(ignore=[])
        config["quantization_config"]["config_groups"]["group_0"].update(targets=[r"re:.*\.experts\..*"])

    models.edit_config(path, targets)
    verify_headers(path)


@pytest.mark.parametrize(
    ("fmt", "change", "error", "message"),
    [
        ("quads", lambda q: q.update(quant_method="awq"), CheckpointError, "quant_method is 'awq', which is not NVFP4"),
        ("quads", lambda q: q.update(version=99), ContractError, "this contract has version 99"),
        ("quads", lambda q: q.update(scheme="w2a2"), ContractError, "scheme: is 'w2a2'"),
        ("modelopt", lambda q: q.update(quant_algo="FP8"), CheckpointError, "quant_algo is 'FP8', expected NVFP4"),
        ("modelopt", lambda q: q.update(group_size=32), CheckpointError, "group_size is 32, expected 16"),
        (
            "compressed-tensors",
            lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8),
            CheckpointError,
            r"group_0 .* = \('nvfp4-pack-quantized', 8, 'float', 16\)",
        ),
        (
            "compressed-tensors",
            lambda q: q["config_groups"]["group_0"].update(format="float-quantized"),
            CheckpointError,
            "'float-quantized'",
        ),
        ("compressed-tensors", lambda q: q.update(config_groups={}), CheckpointError, "has no config_groups"),
    ],
)
def test_unknown_scheme_or_version(
    copy: Callable[[str], Path], fmt: str, change: Callable[[dict[str, Any]], Any], error: type, message: str
) -> None:
    """What is not NVFP4, or of another contract version, is refused with what QUADS reads."""
    path = copy(fmt)
    models.edit_config(path, lambda c: change(c["quantization_config"]))
    with pytest.raises(error, match=message):
        detect(path)


@pytest.mark.parametrize("fmt", FORMATS)
def test_lost_quantization_config(copy: Callable[[str], Path], fmt: str) -> None:
    """Packed tensors without any configuration are not taken for BF16."""
    path = copy(fmt)
    models.edit_config(path, lambda c: c.pop("quantization_config"))
    (path / "hf_quant_config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="holds packed weights .* but config.json has no quantization_config"):
        detect(path)


def test_configuration_without_packed_weights(copy: Callable[[str], Path]) -> None:
    """A BF16 checkpoint whose config claims to be quantized."""
    path = copy("bf16")
    models.edit_config(path, lambda c: c.update(quantization_config={"quant_method": "quads", "version": 1}))
    with pytest.raises(CheckpointError, match="says quads, but no weight is packed"):
        verify_headers(path)


@pytest.mark.parametrize(
    ("suffix", "byte", "message"),
    [("weight_scale", 0x7F, "block scales are NaN"), ("weight_scale", 0xB8, "block scales are negative")],
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bad_block_scale(copy: Callable[[str], Path], fmt: str, suffix: str, byte: int, message: str) -> None:
    """NaN and negative block scales are values: inspect and loading find them, by name."""
    path = copy(fmt)

    def poison(t: torch.Tensor) -> torch.Tensor:
        t.view(torch.uint8)[7, 1] = byte
        return t

    models.edit(path, _replace(f"{MODULE}.{suffix}", poison))
    verify_headers(path)
    report = inspect_checkpoint(path)
    assert not report.ok
    assert report.fingerprint is None
    assert len(report.problems) == 1
    assert report.problems[0].startswith(f"{MODULE}: 1 {message}")
    with pytest.raises(FormatError, match=message):
        load_packed(path, MODULE)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("fmt", ["quads", "compressed-tensors"])
def test_bad_global_scale(copy: Callable[[str], Path], fmt: str, value: float) -> None:
    """A global scale that is zero, negative or not finite, in either direction."""
    path = copy(fmt)
    models.edit(path, _replace(f"{MODULE}.{_names(fmt)[1]}", lambda t: torch.full_like(t, value)))
    assert any(f"{MODULE}: global scale" in p for p in inspect_checkpoint(path).problems)


@pytest.mark.parametrize("fmt", ["modelopt", "compressed-tensors"])
def test_bad_input_scale(copy: Callable[[str], Path], fmt: str) -> None:
    """A static activation scale that is zero, negative or not finite is found by name."""
    path = copy(fmt)
    name = f"{MODULE}.{'input_global_scale' if fmt == 'compressed-tensors' else 'input_scale'}"
    for value in (0.0, -1.0, float("nan")):
        models.edit(path, lambda t, v=value: t.update({name: torch.full_like(t[name], v)}))
        assert inspect_checkpoint(path).problems == [
            f"{name}: is {value}, expected a finite positive scale; calibrate again"
        ]


@pytest.mark.parametrize("fmt", ["quads", "bf16"])
def test_nan_in_what_stays_bf16(copy: Callable[[str], Path], tmp_path: Path, fmt: str) -> None:
    """inspect reads everything: NaN in a norm, or Inf in a router, is found in quantized and plain checkpoints."""
    path = models.make(tmp_path / "plain", shards=1) if fmt == "bf16" else copy(fmt)
    models.edit(path, lambda t: t["model.norm.weight"][:2].fill_(float("nan")))
    models.edit(path, lambda t: t["model.layers.1.mlp.gate.weight"][0, :1].fill_(float("inf")))
    report = inspect_checkpoint(path)
    assert sorted(p.partition(" values")[0] for p in report.problems) == [
        "model.layers.1.mlp.gate.weight: 1",
        "model.norm.weight: 2",
    ]
    assert report.fingerprint is None


def test_load_packed_takes_any_spelling_and_says_what_is_wrong(tmp_path: Path) -> None:
    """Canonical and on-disk names lead to one tensor; an unknown or BF16 weight is an error that says which."""
    quantize_checkpoint(models.make(tmp_path / "src", "mixtral"), tmp_path / "m")
    a = load_packed(tmp_path / "m", "model.layers.0.block_sparse_moe.experts.1.w3.weight")
    b = load_packed(tmp_path / "m", MODULE)
    assert torch.equal(a.codes, b.codes)
    with pytest.raises(CheckpointError, match="q_proj is in the checkpoint but not packed"):
        load_packed(tmp_path / "m", "model.layers.0.self_attn.q_proj")
    with pytest.raises(CheckpointError, match="nope is not in the checkpoint"):
        load_packed(tmp_path / "m", "nope")


def test_unequal_gate_and_up_scales_are_read_exactly(copy: Callable[[str], Path]) -> None:
    """Checkpoints whose w1 and w3 scales differ are valid; each half dequantizes with its own scale."""
    path = copy("modelopt")
    models.edit(path, _replace(f"{MODULE}.weight_scale_2", lambda t: t * 2))
    assert inspect_checkpoint(path).ok
    gate = MODULE.replace("up_proj", "gate_proj")
    assert load_packed(path, MODULE).decode_scale == 2 * load_packed(path, gate).decode_scale


def test_inspection_numbers(copy: Callable[[str], Path]) -> None:
    """Bits per weight, blocks, counts and dtypes per projection and layer."""
    report = inspect_checkpoint(copy("quads"))
    rows = {r.name: r for r in report.layers}
    row = rows["model.layers.0.mlp.experts.*.up_proj"]
    assert (row.format, row.matrices) == ("nvfp4", models.EXPERTS)
    assert row.parameters == models.EXPERTS * models.INTER * models.H
    assert row.blocks == row.parameters // 16
    assert row.bits_per_weight == pytest.approx(4.5 + 32 / (models.INTER * models.H))
    assert row.saturated_blocks >= 0
    assert row.zero_blocks == 0
    assert rows["model.layers.0.mlp.gate"].format == "bf16"
    assert rows["lm_head"].bits_per_weight == 16
    assert len(report.fingerprint or "") == 16
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
