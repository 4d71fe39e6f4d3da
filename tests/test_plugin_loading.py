# SPDX-License-Identifier: Apache-2.0
"""Loading: every kind of checkpoint ends in the same packed parameters, and a damaged one in one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import damaged, quads_layers, scores, tensors_of

pytest.importorskip("vllm")

from vllm_quads.checkpoint import load_packed, quantize_checkpoint
from vllm_quads.nvfp4 import CheckpointError, Contract, ContractError, FormatError
from vllm_quads.refit import as_engine

FORMATS = ("quads", "modelopt", "compressed-tensors")
EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def packed(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """packed(format) -> the tiny Qwen3-MoE quantized into that format."""
    root = tmp_path_factory.mktemp("packed")

    def get(fmt: str) -> Path:
        if not (root / fmt).exists():
            quantize_checkpoint(tiny_qwen3_moe, root / fmt, format=fmt)
        return root / fmt

    return get


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_load_to_the_same_engine(
    fmt: str, tiny_qwen3_moe: Path, packed: Callable[[str], Path], module_engine: Callable[..., Any]
) -> None:
    """BF16 quantized while it loads, and each packed format, give bit-equal log-probs and fingerprints."""
    online, offline = module_engine(tiny_qwen3_moe), module_engine(packed(fmt))
    assert as_engine(online).fingerprint() == as_engine(offline).fingerprint()
    assert as_engine(online).quantized() == as_engine(offline).quantized()
    assert scores(online) == scores(offline)


def test_engine_multiplies_with_the_exported_bytes(
    tiny_qwen3_moe: Path, packed: Callable[[str], Path], module_engine: Callable[..., Any]
) -> None:
    """The codes, block scales and global scale in an engine that loaded BF16 are those that `quads quantize` writes."""
    runtime = quads_layers(module_engine(tiny_qwen3_moe))["quads.model.layers.1.mlp.experts"]
    for matrix in runtime.loader.matrices:
        mine, theirs = runtime.loader.packed(matrix), load_packed(packed("quads"), matrix.name)
        assert torch.equal(mine.codes, theirs.codes), matrix.name
        assert torch.equal(mine.block_scales.view(torch.uint8), theirs.block_scales.view(torch.uint8))
        assert torch.equal(mine.decode_scale, theirs.decode_scale)


def test_unequal_gate_and_up_scales_survive(
    packed: Callable[[str], Path], tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """w1 and w3 with global and input scales of their own keep them (vLLM takes w1's for both, or lets w3 overwrite w1)
    and the up half dequantizes with its own."""

    def change(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith(".weight_scale_2")]:
            module = name.removesuffix(".weight_scale_2")
            for part, factor, scale in (("gate_proj", 1.0, 0.25), ("up_proj", 3.0, 0.5), ("down_proj", 1.0, 0.125)):
                if module.endswith(part):
                    t[name] = t[name] * factor
                    t[f"{module}.input_scale"] = torch.tensor(scale)

    path = damaged(packed("modelopt"), tmp_path / "unequal", change)
    llm = module_engine(path)
    runtime = quads_layers(llm)["quads.model.layers.1.mlp.experts"]
    stored, layer = tensors_of(path), runtime.layer
    for i, part in enumerate(("gate_proj", "up_proj")):
        assert layer.w13_weight_scale_2[2, i] == stored[f"{EXPERT}.{part}.weight_scale_2"]
        assert layer.w13_input_scale[2, i] == stored[f"{EXPERT}.{part}.input_scale"]
    assert layer.w2_input_scale[2] == 0.125
    scores(llm, max_tokens=1)  # decodes the operands
    matrix = runtime.backend._prepared.w13[2]
    half = matrix.decode.numel() // 2
    assert torch.equal(matrix.decode[half:], stored[f"{EXPERT}.up_proj.weight_scale_2"].expand(half))
    expected = load_packed(path, f"{EXPERT}.up_proj").dequantize()
    assert torch.equal(matrix.weight[half:] * matrix.decode[half:, None], expected)


def test_static_activation_scales(
    packed: Callable[[str], Path], tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """Static activation scales come from the checkpoint's input_scale, and its absence is an error that names it."""
    static = {"quads": {"activation": {"global_scale": "static", "block_scale_rule": "max_to_six"}}}

    def change(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith(".weight_scale_2")]:
            t[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.004)

    path = damaged(packed("modelopt"), tmp_path / "static", change)
    llm = module_engine(path, additional_config=static)
    runtime = quads_layers(llm)["quads.model.layers.0.mlp.experts"]
    assert runtime.static_scale(runtime.layer.w2_input_scale)[0] == 1.0 / torch.tensor(0.004)
    assert scores(llm) != scores(module_engine(packed("modelopt")))
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.input_scale: is missing.*static"):
        module_engine(tiny_qwen3_moe, additional_config=static)


def test_mixtral_names(tiny_mixtral: Path, tmp_path: Path, module_engine: Callable[..., Any]) -> None:
    """Mixtral (block_sparse_moe, w1/w2/w3) is quantized under canonical names, online as offline."""
    quantize_checkpoint(tiny_mixtral, tmp_path / "q")
    online, offline = module_engine(tiny_mixtral), module_engine(tmp_path / "q")
    assert scores(online) == scores(offline)
    assert f"{EXPERT}.gate_proj" in as_engine(online).quantized()


def test_fused_expert_stacks(tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]) -> None:
    """transformers-5 stacks (experts.gate_up_proj [E, 2I, H], experts.down_proj) load like per-expert tensors."""

    def fuse(t: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            head = f"model.layers.{i}.mlp.experts"
            parts = {
                p: torch.stack([t.pop(f"{head}.{e}.{p}.weight") for e in range(4)])
                for p in ("gate_proj", "up_proj", "down_proj")
            }
            t[f"{head}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
            t[f"{head}.down_proj"] = parts["down_proj"]

    fused = module_engine(damaged(tiny_qwen3_moe, tmp_path / "fused", fuse))
    assert scores(fused) == scores(module_engine(tiny_qwen3_moe))


def test_dense_linears(tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]) -> None:
    """q, k, v and o are quantized when the contract says so, share a global scale as qkv, and load alike both ways."""
    options = {"targets": ["*.experts.*", "*.self_attn.*_proj"]}
    online = module_engine(tiny_qwen3_moe, additional_config={"quads": options})
    quantize_checkpoint(tiny_qwen3_moe, tmp_path / "q", contract=Contract().merged(options))
    offline = module_engine(tmp_path / "q")
    assert "model.layers.0.self_attn.k_proj" in as_engine(online).quantized()
    assert as_engine(online).fingerprint() == as_engine(offline).fingerprint()
    assert scores(online) == scores(offline)
    runtime = quads_layers(online)["quads.model.layers.0.self_attn.qkv_proj"]
    assert runtime.layer.weight_scale_2.unique().numel() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight_scale"), rf"{EXPERT}.up_proj.weight_scale: is missing"),
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight_scale_2"), rf"{EXPERT}.up_proj.weight_scale_2: is missing"),
        (
            lambda t: [t.pop(f"{EXPERT}.down_proj.{s}") for s in ("weight", "weight_scale", "weight_scale_2")],
            r"experts.2.down_proj: is missing",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight_scale": torch.ones(4)}),
            r"mlp.gate.weight_scale: is a scale tensor without a packed weight",
        ),
        (
            lambda t: t.update({f"{EXPERT}.up_proj.weight_scale": torch.ones(48, 4)}),
            rf"{EXPERT}.up_proj.weight_scale: is F32, expected F8_E4M3",
        ),
        (
            lambda t: t.update({f"{EXPERT}.up_proj.weight_scale": t[f"{EXPERT}.up_proj.weight_scale"][:, :2]}),
            rf"{EXPERT}.up_proj.weight_scale: has shape \[48, 2\], expected \[48, 4\]",
        ),
        (
            lambda t: t[f"{EXPERT}.up_proj.weight_scale"].view(torch.uint8)[3, 1].fill_(0x7F),
            rf"{EXPERT}.up_proj.weight: 1 block scales are NaN",
        ),
        (
            lambda t: t[f"{EXPERT}.up_proj.weight_scale"].view(torch.uint8)[3, 1].fill_(0xB8),
            rf"{EXPERT}.up_proj.weight: 1 block scales are negative",
        ),
        (
            lambda t: t[f"{EXPERT}.down_proj.weight_scale_2"].fill_(float("nan")),
            rf"{EXPERT}.down_proj.weight_scale_2: is nan, expected a finite, positive scale",
        ),
    ],
    ids=["no-scale", "no-global", "no-weight", "extra", "dtype", "shape", "nan-scale", "negative-scale", "nan-global"],
)
def test_damaged_packed_checkpoint(
    change: Callable[[dict[str, torch.Tensor]], Any],
    message: str,
    packed: Callable[[str], Path],
    tmp_path: Path,
    module_engine: Callable[..., Any],
) -> None:
    """A missing or extra scale, a wrong dtype or shape, and a NaN or negative scale are refused by name."""
    path = damaged(packed("quads"), tmp_path / "bad", change)
    with pytest.raises((CheckpointError, FormatError), match=message):
        module_engine(path)


def test_nan_weight_is_refused(tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]) -> None:
    """A NaN in a BF16 expert is refused by name instead of becoming finite."""
    path = damaged(
        tiny_qwen3_moe, tmp_path / "nan", lambda t: t[f"{EXPERT}.gate_proj.weight"][0, 0].fill_(float("nan"))
    )
    with pytest.raises(CheckpointError, match=rf"{EXPERT}.gate_proj.weight: holds NaN or Inf"):
        module_engine(path)


def test_missing_expert_is_refused_without_headers(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """vLLM's own reload accepts a missing expert and serves uninitialised memory; the loader names the tensor."""
    llm = module_engine(tiny_qwen3_moe, seed=1)
    tensors = tensors_of(tiny_qwen3_moe)
    tensors.pop(f"{EXPERT}.up_proj.weight")
    with pytest.raises(CheckpointError, match=rf"{EXPERT}.up_proj.weight: is missing"):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_qwen3_moe)})
    assert scores(llm) == scores(module_engine(tiny_qwen3_moe))


def test_k_not_a_multiple_of_16(make_tiny: Callable[..., Path], module_engine: Callable[..., Any]) -> None:
    """An intermediate size that blocks do not divide is refused, naming the tensor and what to do."""
    path = make_tiny("qwen3_moe", moe_intermediate_size=40)
    with pytest.raises(ContractError, match=r"down_proj: K = 40 is not a multiple of 16.*ignore"):
        module_engine(path)


def test_dummy_weights_then_refit(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """An engine that starts without weights (load_format='dummy', as verl does) is exact after its first weights."""
    llm = module_engine(tiny_qwen3_moe, load_format="dummy")
    llm.apply_model(lambda model: model.load_weights(iter(tensors_of(tiny_qwen3_moe).items())))
    assert scores(llm) == scores(module_engine(tiny_qwen3_moe))
