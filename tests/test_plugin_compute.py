# SPDX-License-Identifier: Apache-2.0
"""Computation in the engine: the reference's numbers, per token, whatever the batch, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_helpers import PROMPTS, quads_layers, scores

pytest.importorskip("vllm")

from vllm_quads.checkpoint import iter_packed, quantize_checkpoint
from vllm_quads.compensation import CompensationState, SiteState
from vllm_quads.nvfp4 import Contract
from vllm_quads.plugin import compat
from vllm_quads.plugin.backends import ExpertsRequest
from vllm_quads.refit import as_engine

LAYER = "quads.model.layers.0.mlp.experts"


def mask_of(starts: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    metadata = {"attn": SimpleNamespace(query_start_loc=torch.tensor(starts, dtype=torch.int32))}
    monkeypatch.setattr(compat, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(compat, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    mask = compat.decode_mask(tokens, torch.device("cpu"))
    assert mask is not None
    return mask.tolist()


def test_decode_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is a decode token if its request has exactly one token in the step; padding and prefill are not."""
    assert mask_of([0, 1, 2, 5], 5, monkeypatch) == [True, True, False, False, False]
    assert mask_of([0, 1, 2], 4, monkeypatch) == [True, True, False, False]  # padded rows
    assert mask_of([0, 1, 1, 1, 3], 3, monkeypatch) == [True, False, False]  # padded request slots
    assert mask_of([0, 3, 4, 4], 4, monkeypatch) == [False, False, False, True]


def test_no_metadata_means_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """In profiling and dummy runs nothing is known of requests."""
    monkeypatch.setattr(compat, "is_forward_context_available", lambda: False)
    assert compat.decode_mask(3, torch.device("cpu")) is None


def test_w4a16_engine_equals_a_bf16_engine_of_the_dequantized_weights(
    tiny_qwen3_moe: Path, tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """The engine multiplies with exactly the exported values: a W4A16 engine and a Hugging Face model that holds the
    dequantized weights agree to the rounding of BF16 activations."""
    import transformers

    quantize_checkpoint(tiny_qwen3_moe, tmp_path / "q")
    llm = module_engine(tiny_qwen3_moe, additional_config={"quads": {"scheme": "w4a16"}})
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.float32)
    experts = {n: p.dequantize() for n, p in iter_packed(tmp_path / "q")}
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            for e in range(4):
                head = f"model.layers.{i}.mlp.experts.{e}"
                gate_up = torch.cat((experts[f"{head}.gate_proj"], experts[f"{head}.up_proj"]))
                layer.mlp.experts.gate_up_proj[e] = gate_up
                layer.mlp.experts.down_proj[e] = experts[f"{head}.down_proj"]
        logits = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    theirs = logits[:-1].gather(-1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    mine = torch.tensor(scores(llm)[: len(PROMPTS[0]) - 1])
    assert (mine - theirs).abs().mean() < 0.02


def test_scores_do_not_depend_on_the_batch(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """Per-token scales and per-token forms: a prompt scores the same alone and beside others."""
    from vllm import SamplingParams

    llm = module_engine(tiny_qwen3_moe)
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0, detokenize=False)

    def run(prompts: list[list[int]]) -> list[float]:
        llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [next(iter(entry.values())).logprob for entry in out[0].outputs[0].logprobs]

    alone, together = run([PROMPTS[0]]), run(PROMPTS)
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), atol=2e-2)


def test_auto_form_is_rows_for_decode_and_blocks_for_prefill(
    tiny_qwen3_moe: Path, module_engine: Callable[..., Any]
) -> None:
    """Form.AUTO gives each token what Form.ROWS (decode) and Form.BLOCKS (prefill) would give it."""
    from vllm import SamplingParams

    llm = module_engine(tiny_qwen3_moe)
    runtime = quads_layers(llm)[LAYER]
    engine = as_engine(llm)
    original, seen = runtime.backend.forward, []

    def spy(request: ExpertsRequest) -> torch.Tensor:
        out: torch.Tensor = original(request)
        if request.decode is not None:
            form = "rows" if bool(request.decode.all()) else "blocks"
            contract = Contract().merged({"compensation": {"form": form}})
            seen.append((request.x.shape[0], form, torch.equal(out, original(replace(request, contract=contract)))))
        return out

    runtime.backend.forward = spy
    try:
        engine.set_activation(Contract())
        params = SamplingParams(max_tokens=3, temperature=0, detokenize=False)
        llm.generate([{"prompt_token_ids": p} for p in PROMPTS[:2]], params, use_tqdm=False)
    finally:
        del runtime.backend.forward
    assert {form for _, form, _ in seen} == {"rows", "blocks"}


def test_state_and_centring_change_the_scores(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """Channel sets and centring vectors take effect at once, survive vLLM's layerwise reload, and can be taken back."""
    llm = module_engine(tiny_qwen3_moe)
    engine = as_engine(llm)
    before = scores(llm)
    w13 = SiteState(torch.linspace(-0.2, 0.2, 64), torch.tensor([[True, False, True, False]]))
    w2 = SiteState(torch.zeros(48), torch.tensor([[True, False, False]] * 4))
    state = CompensationState({"model.layers.0.mlp.experts.w13": w13, "model.layers.0.mlp.experts.w2": w2})
    engine.set_compensation(state)
    changed = scores(llm)
    assert changed != before
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_qwen3_moe)})
    assert engine.compensation().sites["model.layers.0.mlp.experts.w13"].center.equal(w13.center)
    assert scores(llm) == changed
    engine.set_activation(
        Contract().merged({"activation": {"centering": "none"}, "compensation": {"form": "none", "ratio": 0.0}})
    )
    plain = scores(llm)
    engine.set_compensation(CompensationState())
    assert scores(llm) == plain  # the contract says whether the state takes effect
    engine.set_activation(Contract())
    assert scores(llm) == before
    with pytest.raises(Exception, match=r"names model.layers.7.mlp.experts.w13, which is no quantized site"):
        engine.set_compensation(CompensationState({"model.layers.7.mlp.experts.w13": w13}))
    bad = SiteState(torch.zeros(32), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(Exception, match=r"w13: has 32 channels and 1 groups, expected 64 and 1"):
        engine.set_compensation(CompensationState({"model.layers.0.mlp.experts.w13": bad}))


def test_statistics_count_every_token_once(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """Statistics see each token of each layer once, each (token, expert) pair once, and only while switched on."""
    from vllm import SamplingParams

    llm = module_engine(tiny_qwen3_moe)
    engine, runtime = as_engine(llm), quads_layers(llm)[LAYER]
    llm.reset_prefix_cache()
    engine.collect_statistics()
    engine.reset_statistics()
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    engine.collect_statistics(False)
    scores(llm, max_tokens=1)
    tokens = sum(len(p) for p in PROMPTS)
    assert int(runtime.statistics["model.layers.0.mlp.experts.w13"].tokens[0]) == tokens
    assert int(runtime.statistics["model.layers.0.mlp.experts.w2"].tokens.sum()) == 2 * tokens
    assert set(runtime.site_inputs()) == {"model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2"}
    engine.reset_statistics()
    assert runtime.site_inputs() == {}


def test_nan_activation_stays_nan(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> None:
    """A token that arrives as NaN leaves as NaN and does not touch the other tokens."""
    llm = module_engine(tiny_qwen3_moe)
    scores(llm, max_tokens=1)
    runtime = quads_layers(llm)[LAYER]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights, ids = torch.full((3, 2), 0.5), torch.tensor([[0, 1], [1, 2], [2, 3]])
    clean = runtime.forward(x, weights, ids)
    x[1, 5] = float("nan")
    out = runtime.forward(x, weights, ids)
    assert bool(out[1].isnan().all())
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.slow
def test_compiled_engine_refits(
    tiny_qwen3_moe: Path, make_tiny: Callable[..., Path], module_engine: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Under torch.compile the layers are opaque operators: compiled graphs hold no weights and no state, so a refit and
    a change of activation options take effect, back and forth."""
    from plugin_helpers import tensors_of

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    other = make_tiny("qwen3_moe", seed=9)
    llm = module_engine(tiny_qwen3_moe, enforce_eager=False, seed=3)
    first = scores(llm)
    llm.apply_model(lambda model: model.load_weights(iter(tensors_of(other).items())))
    second = scores(llm)
    as_engine(llm).set_activation(Contract().merged({"scheme": "w4a16"}))
    third = scores(llm)
    as_engine(llm).set_activation(Contract())
    llm.apply_model(lambda model: model.load_weights(iter(tensors_of(tiny_qwen3_moe).items())))
    assert len({tuple(s) for s in (first, second, third)}) == 3
    assert scores(llm) == first
