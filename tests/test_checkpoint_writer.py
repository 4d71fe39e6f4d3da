# SPDX-License-Identifier: Apache-2.0
"""`CheckpointWriter` as a trainer uses it, on-disk names, ignore patterns, and exact encode scales."""

from __future__ import annotations

from pathlib import Path

import checkpoint_models as models
import pytest
import torch

from vllm_quads.checkpoint import CheckpointWriter, fingerprint_checkpoint, quantize_checkpoint, verify_headers
from vllm_quads.checkpoint.disk_names import disk_name
from vllm_quads.checkpoint.layouts import encode_of
from vllm_quads.checkpoint.patterns import describe, excludes, to_regex
from vllm_quads.nvfp4 import CheckpointError, FormatError, PackedTensor, encode_scale


def _write_stacked(dst: Path, src: Path, model_type: str, fmt: str = "quads") -> str:
    """What a trainer does: fused BF16 parameters, packed as stacks with canonical names, the rest added as it is."""
    config, _ = models.family(model_type)
    tensors = models.read(src)
    moe = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    with CheckpointWriter(dst, format=fmt, config=config) as writer:
        for name, tensor in tensors.items():
            if ".experts." not in name:
                writer.add(name.replace("block_sparse_moe", "mlp"), tensor)
        for i in range(models.LAYERS):
            head = f"model.layers.{i}.{moe}.experts"
            one = [[tensors[f"{head}.{e}.{n}.weight"] for n in (gate, up, down)] for e in range(models.EXPERTS)]
            w13 = torch.stack([torch.cat(w[:2]) for w in one])
            writer.add_packed(f"model.layers.{i}.mlp.experts.gate_up_proj", PackedTensor.quantize(w13))
            w2 = torch.stack([w[2] for w in one])
            writer.add_packed(f"model.layers.{i}.mlp.experts.down_proj", PackedTensor.quantize(w2))
        fingerprint = writer.fingerprint
        writer.finish({"use_cache": False}, copy_files_from=src)
    return fingerprint


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
@pytest.mark.parametrize("fmt", ["quads", "modelopt", "compressed-tensors"])
def test_trainer_export_equals_quantize(tmp_path: Path, model_type: str, fmt: str) -> None:
    """Packed stacks under canonical names give the very tensors that `quantize_checkpoint` writes from the files."""
    src = models.make(tmp_path / "src", model_type)
    fingerprint = _write_stacked(tmp_path / "a", src, model_type, fmt)
    report = quantize_checkpoint(src, tmp_path / "b", format=fmt)
    a, b = models.read(tmp_path / "a"), models.read(tmp_path / "b")
    assert a.keys() == b.keys()
    for name in a:
        assert (
            torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) if a[name].dim() else a[name] == b[name]
        )
    assert fingerprint == report.fingerprint == fingerprint_checkpoint(tmp_path / "a")
    info = verify_headers(tmp_path / "a")
    assert info.config["use_cache"] is False
    assert (tmp_path / "a" / "tokenizer.json").exists()


def test_stack_that_stays_in_bf16_is_split(tmp_path: Path) -> None:
    """`add` of a fused stack writes one tensor per expert, gate rows first."""
    config, tensors = models.family("fused")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with CheckpointWriter(tmp_path / "x", config=config) as writer:
        writer.add(name, tensors[name])
        assert {"model.layers.0.mlp.experts.3.up_proj.weight"} <= writer._seen
    assert not (tmp_path / "x").exists()


def test_adding_twice_is_an_error(tmp_path: Path) -> None:
    """A trainer that exports a tied or shared tensor twice is told which."""
    config, _ = models.family("qwen3")
    packed = PackedTensor.quantize(torch.ones(16, 32))
    with CheckpointWriter(tmp_path / "x", config=config) as writer:
        writer.add_packed("model.layers.0.mlp.experts.0.up_proj", packed)
        with pytest.raises(CheckpointError, match="experts.0.up_proj.weight: was added twice"):
            writer.add_packed("model.layers.0.mlp.experts.0.up_proj.weight", packed)


def test_incomplete_export_does_not_appear(tmp_path: Path) -> None:
    """An export that forgot an expert fails in `finish`; nothing is at the destination."""
    config, _ = models.family("qwen3")
    packed = PackedTensor.quantize(torch.ones(16, 32))
    with CheckpointWriter(tmp_path / "x", config=config | {"num_hidden_layers": 1}) as writer:
        writer.add_packed("model.layers.0.mlp.experts.0.up_proj", packed)
        with pytest.raises(CheckpointError, match="is missing"):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "model_type", "disk"),
    [
        (
            "model.layers.0.mlp.experts.3.up_proj.weight",
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.3.w3.weight",
        ),
        ("model.layers.0.mlp.experts.3.down_proj", "mixtral", "model.layers.0.block_sparse_moe.experts.3.w2"),
        ("model.layers.0.mlp.gate.weight", "mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("model.layers.0.block_sparse_moe.gate.weight", "mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "mixtral", "model.layers.0.mlp.gate_proj.weight"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight"),
    ],
)
def test_disk_names(name: str, model_type: str, disk: str) -> None:
    """Families with another spelling on disk get it; the others keep their names."""
    assert disk_name(name, {"model_type": model_type}) == disk


def test_ignore_lists_are_short_and_exact() -> None:
    """Globs cover all that stays in BF16 and nothing that is packed, in the form that vLLM asks for fused modules."""
    layers = range(12)
    rest = {"lm_head", *(f"model.layers.{i}.self_attn.{n}_proj" for i in layers for n in "qkvo")}
    rest |= {f"model.layers.{i}.mlp.gate" for i in layers} | {
        f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(4)
    }
    packed = {f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in layers[1:] for e in range(4)}
    globs = describe(rest, packed)
    assert sorted(globs) == [
        "lm_head",
        "model.layers.*.mlp.gate",
        "model.layers.*.self_attn*",
        "model.layers.0.mlp*",
        "model.layers.0.mlp.experts*",
    ]
    for pattern_of in (str, to_regex):
        patterns = [pattern_of(g) for g in globs]
        assert all(any(excludes(p, m) for p in patterns) for m in rest)
        assert not any(excludes(p, m) for p in patterns for m in packed)
        assert any(excludes(p, "model.layers.3.self_attn.qkv_proj") for p in patterns)
        assert any(excludes(p, "model.layers.0.mlp.experts") for p in patterns)


def test_foreign_patterns() -> None:
    """Globs, exact names, parents and regular expressions as ModelOpt and compressed-tensors mean them."""
    assert excludes("re:.*mlp.gate$", "model.layers.0.mlp.gate")
    assert not excludes("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj")
    assert excludes("*mlp.gate*", "model.layers.0.mlp.gate")
    assert excludes("model.layers.0", "model.layers.0.mlp.gate")
    assert not excludes("model.layers.1", "model.layers.10.mlp.gate")
    assert excludes("lm_head", "lm_head")


def test_encode_scale_has_an_exact_way_back() -> None:
    """Every decode scale that QUADS computes has an encode scale whose float32 reciprocal is that very number."""
    g = 1.0 + torch.arange(2**23, dtype=torch.int32).to(torch.float32) * 2.0**-23  # every mantissa
    assert torch.equal(1.0 / encode_of(1.0 / g), 1.0 / g)
    decode = 1.0 / encode_scale(torch.logspace(-30, 30, 1000))
    assert torch.equal(1.0 / encode_of(decode), decode)


def test_foreign_decode_scale_without_exact_reciprocal_is_refused() -> None:
    """Some float32 numbers are no reciprocal of a float32: compressed-tensors cannot store them, and that is said."""
    reciprocals = 1.0 / (1.0 + torch.arange(200.0) * 2.0**-23)
    candidates = (torch.tensor(1.0 - i * 2.0**-24) for i in range(1, 200))
    bad = next(d for d in candidates if not bool((reciprocals == d).any()))
    with pytest.raises(FormatError, match="is not the reciprocal of a float32"):
        encode_of(bad)
