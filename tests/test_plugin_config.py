# SPDX-License-Identifier: Apache-2.0
"""Configuration: what `--quantization quads` takes over, which options it accepts, and what it refuses, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import damaged, scores, tensors_of

pytest.importorskip("vllm")

from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.nvfp4 import ContractError, Form, QuadsError, Scheme
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.source import parse
from vllm_quads.refit import as_engine

NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def ct(**group: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": NVFP4, "input_activations": NVFP4} | group}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}


def test_entry_point_registers_the_method() -> None:
    """vLLM finds the plugin by its entry point; registering twice is harmless."""
    from importlib.metadata import entry_points

    from vllm.model_executor.layers.quantization import get_quantization_config

    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "quads"]
    register = entry.load()
    register()
    register()
    assert get_quantization_config("quads") is QuadsConfig


def test_registration_failure_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM swallows a plugin's exception; the reason is in the log and the exception is not hidden."""
    import vllm.model_executor.layers.quantization as quantization

    from vllm_quads import register

    def broken(name: str) -> Any:
        raise RuntimeError("another vLLM")

    monkeypatch.setattr(quantization, "register_quantization_config", broken)
    with pytest.raises(RuntimeError, match="another vLLM"):
        register()
    assert "quads could not be registered" in caplog.text
    assert "another vLLM" in caplog.text


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt FP8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size 32"),
        (ct(weights=NVFP4 | {"num_bits": 8}), "8 bits"),
        (ct(format="mxfp4-pack-quantized"), "mxfp4-pack-quantized"),
    ],
)
def test_other_schemes_are_refused_by_name(config: dict[str, Any], found: str) -> None:
    """A checkpoint of another scheme is refused with what was found and what is supported, if quads was asked for."""
    with pytest.raises(ContractError, match=rf"{found}.*it serves a quads checkpoint"):
        QuadsConfig.override_quantization_method(config, "quads")
    assert QuadsConfig.override_quantization_method(config, None) is None
    assert QuadsConfig.override_quantization_method(config, "fp8") is None


def test_takeover_only_on_request() -> None:
    """ModelOpt and compressed-tensors NVFP4 checkpoints are taken over only for --quantization quads."""
    for config in ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ct()):
        assert QuadsConfig.override_quantization_method(config, "quads") == "quads"
        assert QuadsConfig.override_quantization_method(config, None) is None
        assert QuadsConfig.override_quantization_method(config, "modelopt_fp4") is None


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4",
         "ignore": ["lm_head", "*self_attn*", "model.layers.*.mlp.gate"]},
        {"quantization": {"quant_algo": "NVFP4",
                          "exclude_modules": ["lm_head", "model.layers.0.self_attn", "*.mlp.gate"]},
         "producer": {"name": "modelopt"}},
        ct() | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]},
        ct() | {"ignore": ["lm_head", r"re:.*\.self_attn\..*", r"re:.*block_sparse_moe\.gate$"]},
    ],
)  # fmt: skip
def test_foreign_ignore_lists(config: dict[str, Any]) -> None:
    """Ignore lists become contract patterns: attention stays, experts go, and a router named `mlp.gate` is not caught
    by (nor does it catch) `gate_proj`."""
    contract = parse(config).contract
    assert contract.selects("model.layers.0.mlp.experts.3.gate_proj")
    assert contract.selects("model.layers.0.mlp.gate_proj")
    assert not contract.selects("model.layers.0.self_attn.q_proj")
    assert not contract.selects("model.layers.0.mlp.gate")
    assert not contract.selects("lm_head")


def test_weight_only_groups_and_bad_expressions() -> None:
    """compressed-tensors without activation quantization is W4A16; an expression that no glob can say is refused."""
    assert parse(ct(input_activations=None)).contract.scheme is Scheme.W4A16
    with pytest.raises(ContractError, match="no equivalent among the glob patterns"):
        parse(ct() | {"ignore": ["re:.*(q|k)_proj"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compensation": {"ratoi": 0.1}}, r"compensation.ratoi: unknown option"),
        ({"compensation": {"ratio": 2}}, r"compensation.ratio: is 2"),
        ({"targets": ["lm_head"]}, r"lm_head: QUADS does not quantize an lm_head"),
        ({"targets": ["*"]}, r"QUADS does not quantize a"),
        ({"targets": ["*.mlp.gate", "*.experts.*"]}, r"mlp.gate: QUADS does not quantize a router"),
        ({"targets": ["*.nothing"]}, r"select no weight of this model"),
        ({"targets": ["*.gate_proj"]}, r"gate_proj is quantized but .*up_proj is not"),
        ({"ignore": ["*.experts.3.*"]}, r"is quantized but .* is not"),
        ("rows", r"additional_config\['quads'\]: is 'rows'"),
    ],
)
def test_bad_options(options: Any, message: str, tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """Options are validated before a weight is loaded, and the error names the option or the layer."""
    with pytest.raises(ContractError, match=message):
        module_engine(tiny_qwen3_moe, additional_config={"quads": options})


def test_options_reach_the_contract(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """`--additional-config '{"quads": {...}}'` changes the contract; without it the defaults hold."""
    options = {"compensation": {"form": "rows"}, "ignore": ["*.layers.0.*"]}
    with pytest.warns(UserWarning, match="matches no weight"):
        llm = module_engine(
            tiny_qwen3_moe, additional_config={"quads": options | {"ignore": ["*.layers.0.*", "*.typo"]}}
        )
    contract = as_engine(llm).contract()
    assert contract.compensation.form is Form.ROWS
    assert all(name.startswith("model.layers.1.mlp.experts.") for name in as_engine(llm).quantized().shapes)
    assert contract.digest() != as_engine(module_engine(tiny_qwen3_moe)).contract().digest()


def test_hf_overrides_channel(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """An unquantized checkpoint takes its contract from `hf_overrides` as well."""
    text = json.dumps({"scheme": "w4a16"})
    llm = module_engine(tiny_qwen3_moe, hf_overrides={"quantization_config_dict_json": text})
    assert as_engine(llm).contract().scheme is Scheme.W4A16


def test_stored_contract_decides_the_weights(
    tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """A packed checkpoint keeps its set; options change the activation path only. `--quantization` is not needed."""
    quantize_checkpoint(tiny_qwen3_moe, tmp_path / "q")
    with pytest.raises(ContractError, match="targets: is fixed by this quads checkpoint"):
        module_engine(tmp_path / "q", additional_config={"quads": {"targets": ["*_proj"]}})
    llm = module_engine(
        tmp_path / "q", quantization=None, additional_config={"quads": {"compensation": {"ratio": 0.5}}}
    )
    assert as_engine(llm).contract().compensation.ratio == 0.5


def test_stored_contract_of_another_version(
    tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """A checkpoint written by another contract version is refused with what to do."""
    quantize_checkpoint(tiny_qwen3_moe, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    path = damaged(tmp_path / "q", tmp_path / "v9", lambda t: None, quantization_config=config | {"version": 9})
    with pytest.raises(ValueError, match="version 9.*install a matching vllm-quads"):
        module_engine(path)


def test_model_without_experts(tmp_path: Path, module_engine: Callable[..., Any]) -> None:
    """A dense model with the default targets is refused with an example of what to target instead."""
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=256,
        intermediate_size=96, max_position_embeddings=512, dtype=torch.bfloat16,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    with pytest.raises(ContractError, match=r"no routed experts: name its linears, for example"):
        module_engine(tmp_path / "dense")
    llm = module_engine(tmp_path / "dense", additional_config={"quads": {"targets": ["*.mlp.*_proj"]}})
    assert list(as_engine(llm).quantized().shapes) == [
        f"model.layers.0.mlp.{part}_proj" for part in ("down", "gate", "up")
    ]
    assert all(s == s for s in scores(llm))


def test_tied_embeddings(make_tiny: Callable[..., Path], module_engine: Callable[..., Any]) -> None:
    """A model whose lm_head is its embedding loads, scores and refits; the shared weight stays in BF16."""
    first, second = (make_tiny("qwen3_moe", seed=s, tie_word_embeddings=True) for s in (0, 1))
    llm, fresh = module_engine(first), module_engine(second)
    assert not any("lm_head" in n or "embed" in n for n in as_engine(llm).quantized().shapes)
    llm.apply_model(lambda model: model.load_weights(iter(tensors_of(second).items())))
    assert scores(llm) == scores(fresh)


def test_engine_without_quads(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """Asking a BF16 engine for its contract says how to start one that has it."""
    llm = module_engine(tiny_qwen3_moe, quantization=None)
    with pytest.raises(QuadsError, match='quantization="quads"'):
        as_engine(llm).fingerprint()
