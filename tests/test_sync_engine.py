# SPDX-License-Identifier: Apache-2.0
"""Trainer and a running vLLM engine: after a push both hold the same numbers, or the engine is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import PROMPTS, decoded, scores
from torch import nn
from transformers import AutoModelForCausalLM

from trainer_qat import (
    RolloutSync,
    export_checkpoint,
    mismatch,
    prepare_qat,
    probe_layers,
    qat_disabled,
    score,
    sensitivities,
    token_log_probs,
)
from trainer_qat.push_stream import PushStream
from vllm_quads.checkpoint import fingerprint_checkpoint
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, MismatchError, RefitError
from vllm_quads.refit import Manifest, as_engine

DOCUMENTED = Path(__file__).parents[1] / "docs" / "rl-integration.md"
LINEARS = {"targets": ["*.experts.*", "*.self_attn.*_proj"]}


def trainer(path: Path, contract: Contract, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The checkpoint as a Hugging Face model under fake quantization."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    prepare_qat(model, contract)
    return model


def train(model: nn.Module, steps: int = 2, seed: int = 0) -> None:
    """A few optimizer steps, large enough to change every weight."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        ids = torch.randint(0, 256, (4, 32), generator=generator)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def shared(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> tuple[Any, nn.Module]:
    """One engine and its trainer, default contract."""
    return module_engine(tiny_qwen3_moe), trainer(tiny_qwen3_moe, Contract())


@pytest.mark.parametrize("case", ["qwen3, experts, BF16 masters", "mixtral, all linears, FP32 masters"])
def test_pushed_engine_equals_a_fresh_one_on_the_export(
    case: str,
    tiny_qwen3_moe: Path,
    tiny_mixtral: Path,
    engine: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Log-probs after training and a push equal, bit for bit, those of an engine that loads the exported checkpoint;
    trainer, both engines and the checkpoint have one fingerprint."""
    path, options = (tiny_mixtral, LINEARS) if case.startswith("mixtral") else (tiny_qwen3_moe, {})
    contract = Contract().merged(options)
    llm = engine(path, additional_config={"quads": options})
    model = trainer(path, contract, torch.float32 if "FP32" in case else torch.bfloat16)
    before = scores(llm)
    train(model)
    report = RolloutSync(model, llm).push()
    after = scores(llm)
    assert after != before
    exported = export_checkpoint(model, tmp_path / "out")
    fresh = engine(tmp_path / "out")
    assert scores(fresh) == after
    fingerprints = {report.fingerprint, exported.fingerprint, fingerprint_checkpoint(tmp_path / "out")}
    assert fingerprints | {as_engine(llm).fingerprint(), as_engine(fresh).fingerprint()} == {report.fingerprint}
    assert as_engine(fresh).contract() == as_engine(llm).contract() == contract


def test_identical_pushes_change_nothing(shared: tuple[Any, nn.Module]) -> None:
    """Two pushes of the same weights, packed and as BF16, give the same fingerprint and the same log-probs."""
    llm, model = shared
    sync = RolloutSync(model, llm)
    first, values = sync.push(), scores(llm)
    for packed in (True, False):
        again = sync.push(packed=packed)
        assert again.fingerprint == first.fingerprint
        assert scores(llm) == values
    assert again.policy_version == first.policy_version + 2 == as_engine(llm).policy_version()
    assert again.bytes > first.bytes


def test_a_push_resets_the_prefix_cache(shared: tuple[Any, nn.Module]) -> None:
    """Tokens generated after a push do not attend to key/value blocks of the previous weights."""
    llm, model = shared
    sync = RolloutSync(model, llm)
    prompt = list(range(40, 110))
    decoded(llm, prompt)
    train(model, 1, seed=3)
    sync.push()
    cached = decoded(llm, prompt)
    llm.reset_prefix_cache()
    assert decoded(llm, prompt) == cached


def test_an_interrupted_push_leaves_the_previous_weights(
    shared: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the trainer dies half-way the engine serves the old policy, unchanged, and takes the next push."""
    llm, model = shared
    sync = RolloutSync(model, llm)
    before, values = sync.push(), scores(llm)
    train(model, 1, seed=4)
    tensors = PushStream.tensors

    def dying(self: PushStream) -> Iterator[Any]:
        for count, item in enumerate(tensors(self)):
            if count == 20:
                raise OSError("out of memory")
            yield item

    monkeypatch.setattr(PushStream, "tensors", dying)
    with pytest.raises(RefitError, match=r"failed after model\..*out of memory.*previous weights keep serving"):
        sync.push()
    rollout = as_engine(llm)
    assert rollout.fingerprint() == before.fingerprint
    assert rollout.policy_version() == before.policy_version
    assert scores(llm) == values
    monkeypatch.undo()
    assert sync.push().fingerprint != before.fingerprint
    assert scores(llm) != values


def test_wrong_contract_and_unknown_tensor_are_refused_by_name(
    shared: tuple[Any, nn.Module], tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another contract, another set, or a tensor that the engine does not have: named, and nothing changes."""
    llm, model = shared
    values, fingerprint = scores(llm), as_engine(llm).fingerprint()
    other = trainer(tiny_qwen3_moe, Contract(keep_last_layers=1))
    with pytest.raises(MismatchError, match="keep_last_layers: 1 != 0"):
        RolloutSync(other, llm)
    sync = RolloutSync(model, llm)
    specs = PushStream(sync.payload).specs()
    extra = {**specs, "model.layers.9.mlp.extra.weight": specs["model.norm.weight"]}
    monkeypatch.setattr(PushStream, "specs", lambda _: extra)
    with pytest.raises(RefitError, match=r"model\.layers\.9\.mlp\.extra"):
        sync.push()
    fewer = {n: s for n, s in specs.items() if n != "model.layers.1.mlp.experts.gate_up_proj.weight_scale"}
    monkeypatch.setattr(PushStream, "specs", lambda _: fewer)
    with pytest.raises(RefitError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: its block scales is missing"):
        sync.push()
    assert (scores(llm), as_engine(llm).fingerprint()) == (values, fingerprint)


def test_wrong_bytes_are_rolled_back(shared: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that do not have the announced fingerprint never serve."""
    llm, model = shared
    values = scores(llm)
    sync = RolloutSync(model, llm)
    make = sync._manifest

    def lying(*args: Any) -> Manifest:
        return replace(make(*args), fingerprint="0" * 16)

    monkeypatch.setattr(sync, "_manifest", lying)
    with pytest.raises(RefitError, match="fingerprint"):
        sync.push()
    assert scores(llm) == values


def test_sensitivities_of_the_trainer_fit_the_engine(
    tiny_qwen3_moe: Path, engine: Callable[..., Any], tmp_path: Path
) -> None:
    """Both sides name their sites alike: sensitivities sent with a push, as the documentation does it, spend the
    engine's budget, an export with the engine's state serves the same log-probs, and in FP32 the trainer's emulation of
    the engine gives them as well."""
    from vllm import SamplingParams

    contract = Contract().merged(LINEARS)
    llm = engine(tiny_qwen3_moe, additional_config={"quads": LINEARS}, dtype="float32")
    rollout = as_engine(llm)
    model = trainer(tiny_qwen3_moe, contract)
    example = DOCUMENTED.read_text().split("### Error statistics and sensitivities")[1].split("```")[1]
    names: dict[str, Any] = {"llm": llm, "model": model, "sync": RolloutSync(model, llm)}
    names["prompts"] = [{"prompt_token_ids": p} for p in PROMPTS]
    names["params"] = SamplingParams(max_tokens=6, temperature=0, detokenize=False)
    exec(compile(example.removeprefix("python"), str(DOCUMENTED), "exec"), names)
    sent = sensitivities(model, names["asked"], names["answered"])
    state: CompensationState = rollout.compensation()  # type: ignore[attr-defined]
    assert state.sites.keys() == sent.keys()
    assert state.sensitivities == pytest.approx(sent)
    assert any(bool(site.blocks.any()) for site in state.sites.values())
    rollout.collect_statistics(False)  # type: ignore[attr-defined]
    values = scores(llm)
    export_checkpoint(model, tmp_path / "out", compensation=state)
    assert scores(engine(tmp_path / "out", dtype="float32")) == values
    # Emulated on the same tokens: those of the prompt as they were prefilled, the others as they were decoded.
    prompt, decoded = len(PROMPTS[0]), 6
    served = torch.tensor(values[: prompt - 1 + decoded])
    ids = torch.tensor([PROMPTS[0] + [int(t) for t in values[prompt - 1 + decoded : prompt - 1 + 2 * decoded]]])
    probe = probe_layers(
        copy.deepcopy(model).float(), ids, compensation=state, decode=torch.arange(ids.numel()) >= prompt
    )
    torch.testing.assert_close(probe.rollout[0], served, rtol=0, atol=1e-4)
    assert (probe.trainer[0] - served).abs().mean() > 0.01


def test_qat_closes_the_gap(tiny_qwen3_moe: Path, engine: Callable[..., Any]) -> None:
    """Against a W4A16 rollout the fake-quantized trainer is at the engines' drift, far below the BF16 trainer."""
    options = {"scheme": "w4a16"}
    llm = engine(tiny_qwen3_moe, additional_config={"quads": options})
    model = trainer(tiny_qwen3_moe, Contract().merged(options))
    RolloutSync(model, llm).push()
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=24, temperature=1.0, seed=0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    completions = [list(o.outputs[0].token_ids) for o in outputs]
    rollout = torch.tensor([[next(iter(e.values())).logprob for e in o.outputs[0].logprobs] for o in outputs])
    qat = mismatch.measure(torch.stack(token_log_probs(score(model, PROMPTS, completions), completions)), rollout)
    with qat_disabled(model):
        plain = mismatch.measure(torch.stack(token_log_probs(score(model, PROMPTS, completions), completions)), rollout)
    assert qat.tokens == 96
    assert qat.mean_gap < 0.3 * plain.mean_gap
    assert qat.k3 < 0.3 * plain.k3
