# SPDX-License-Identifier: Apache-2.0
"""RolloutSync: what arrives is what the trainer has, and a push happens as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from unittest.mock import Mock

import pytest
import torch
from fake_engine import FakeEngine
from torch import nn
from trainer_models import ALL_LINEARS, PerExpertModel, deepseek, mixtral, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import RolloutSync, export_checkpoint, prepare_qat, push_stream, quantizer
from vllm_quads.nvfp4 import (
    Contract,
    ContractError,
    FormatError,
    MismatchError,
    QuantizedSet,
    RefitError,
    WeightGlobalScale,
    canonical_name,
)


def pair(model: nn.Module, contract: Contract = ALL_LINEARS) -> tuple[RolloutSync, FakeEngine]:
    """A prepared model and an engine of the same contract."""
    report = prepare_qat(model, contract)
    engine = FakeEngine(contract, report.quantized)
    return RolloutSync(model, engine), engine


@pytest.mark.parametrize("make", [qwen3, mixtral, deepseek, PerExpertModel])
def test_engine_receives_the_exported_checkpoint(make: object, tmp_path: object) -> None:
    """A push brings what the exported checkpoint holds, tensor by tensor and bit by bit, in far fewer messages where
    experts are stacked; fingerprints agree."""
    model = make()  # type: ignore[operator]
    contract = Contract() if make in (deepseek, PerExpertModel) else ALL_LINEARS
    sync, engine = pair(model, contract)
    report = sync.push()
    assert report.policy_version == 1
    assert report.fingerprint == engine.fingerprint() == sync.payload.fingerprint()
    assert {"trainer_check", "trainer_total", "commit"} <= report.seconds.keys()
    if make is PerExpertModel:
        return
    from safetensors.torch import load_file

    assert export_checkpoint(model, f"{tmp_path}/out").fingerprint == report.fingerprint
    saved = load_file(f"{tmp_path}/out/model.safetensors")
    received = dict(engine.serving)
    for name, packed in engine.packed().items():
        module = next(n for n in saved if canonical_name(n) == name).removesuffix(".weight")
        received |= {
            f"{module}.weight": packed.codes,
            f"{module}.weight_scale": packed.block_scales,
            f"{module}.weight_scale_2": packed.decode_scale,
        }
    for name, tensor in saved.items():
        same = tensor.reshape(-1).view(torch.uint8), received[name].reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
    assert len(engine.serving) < 0.6 * len(saved)


@pytest.mark.parametrize("make", [qwen3, mixtral])
def test_only_what_lies_in_the_model_may_be_held(make: Callable[[], nn.Module]) -> None:
    """An engine may hold any number of tensors that are the model's own memory; where some are copies (experts that
    stay in BF16, which a checkpoint has one by one; a matrix that lies transposed), it is told to hold few at a time.
    """
    for ignore, transposed, expected in (((), False, True), (("model.layers.0.*",), False, False), ((), True, False)):
        model = make().to(torch.bfloat16)
        if transposed:
            weight = model.get_parameter("model.embed_tokens.weight")
            weight.data = weight.data.t().contiguous().t()
        sync, _ = pair(model, Contract(ignore=ignore))
        stream = push_stream.PushStream(sync.payload)
        stream.check()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        plain = [t for _, t in stream.tensors() if t.dtype == torch.bfloat16]
        assert stream.resident == expected == all(t.untyped_storage().data_ptr() in own for t in plain)


def test_bf16_push_gives_the_same_bytes() -> None:
    """An engine that quantizes BF16 weights itself arrives at the trainer's fingerprint, from 3 times the bytes."""
    sync, engine = pair(qwen3(dtype=torch.float32))
    packed = sync.push()
    plain = sync.push(packed=False)
    assert plain.fingerprint == packed.fingerprint
    assert {t.dtype for t in engine.serving.values()} == {torch.bfloat16}
    assert plain.bytes > packed.bytes


def test_versions_and_sensitivities_travel() -> None:
    """Versions count on, or are given; sensitivities arrive as float32 scalars."""
    sync, engine = pair(qwen3())
    sync.push()
    assert sync.push().policy_version == 2
    sync.push(7, {"model.layers.0.mlp.experts.w13": 0.5})
    assert engine.policy_version() == 7
    assert engine.manifest is not None
    assert engine.manifest.compensation == {"model.layers.0.mlp.experts.w13": 0.5}


def test_identical_pushes_are_identical_and_updates_are_not() -> None:
    """Two pushes of the same weights are bit-equal; after an optimizer step the fingerprint is another one."""
    model = qwen3()
    sync, engine = pair(model)
    first, kept = sync.push(), dict(engine.serving)
    second = sync.push()
    assert first.fingerprint == second.fingerprint
    assert all(
        torch.equal(kept[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        for n, t in engine.serving.items()
    )
    model(tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert sync.push().fingerprint != first.fingerprint


def test_a_packed_cache_spares_the_push_its_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the packed cache holds are taken from it, without looking for their amax again; one that has changed
    since is quantized anew, one that has diverged is refused by name before the engine is told."""
    model = qwen3()
    sync, engine = pair(model, Contract())
    expected = sync.push().fingerprint
    other = qwen3()
    prepare_qat(other, Contract(), cache="packed")
    cached = RolloutSync(other, engine)
    other(tokens())
    with monkeypatch.context() as patch:
        for module in (push_stream, quantizer):
            patch.setattr(module, "weight_amax", forbidden := Mock(side_effect=AssertionError("amax")))
        assert cached.push().fingerprint == expected
        assert cached.push(packed=False).fingerprint == expected
    with torch.no_grad():
        for changed in (model, other):
            changed.model.layers[1].mlp.experts.down_proj.mul_(1.5)
    assert expected != sync.push().fingerprint == cached.push().fingerprint
    assert not forbidden.called
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj[1, 0, 0] = torch.inf
    with pytest.raises(FormatError, match="layers.1.mlp.experts"):
        cached.push()
    assert engine.calls[-1] == "commit"


def test_interrupted_push_leaves_the_previous_weights() -> None:
    """A failure half-way aborts, names the last tensor sent, and the next push works."""
    model = qwen3()
    sync, engine = pair(model)
    before = sync.push()
    serving = engine.serving
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(1.5)
    engine.fail_after = 20
    with pytest.raises(RefitError, match=r"version 2 failed after model\.layers\.\d.*connection lost.*status"):
        sync.push()
    assert engine.calls[-3:] == ["begin", "load", "abort"]
    assert engine.serving is serving
    assert engine.fingerprint() == before.fingerprint
    assert engine.version == 1
    engine.fail_after = None
    assert sync.push().fingerprint != before.fingerprint


def test_a_push_that_is_refused_does_not_end_anothers() -> None:
    """An engine that has another push under way refuses at the manifest, and is not told to abort."""
    sync, engine = pair(qwen3())

    def refuse(manifest: object) -> None:
        raise RefitError("a refit is already under way")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "begin", refuse)
        with pytest.raises(RefitError, match="already under way"):
            sync.push()
    assert "abort" not in engine.calls


def test_a_diverged_weight_is_refused_before_anything_is_sent() -> None:
    """NaN in a master weight: FormatError with its name, and the engine hears nothing."""
    model = qwen3()
    sync, engine = pair(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = torch.inf
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        sync.push()
    assert engine.calls == []


@pytest.mark.parametrize("change", ["step", "fused step", "in place", "another model's step"])
@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_change_during_a_push(change: str, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of two policies never serve together: a change while a push is under way is named, whether or not
    digests are compared, and the engine is told to go back. Other models may be trained meanwhile."""
    model, other = qwen3(), nn.Linear(16, 16)
    sync, engine = pair(model)
    trained = other if "another" in change else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, fused="fused" in change or None)
    for p in trained.parameters():
        p.grad = torch.ones_like(p)
    load = engine.load

    def loading(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        def disturbed() -> Iterator[tuple[str, torch.Tensor]]:
            for i, item in enumerate(tensors):
                if i == 5:
                    if change == "in place":
                        with torch.no_grad():
                            model.lm_head.weight.add_(1.0)
                    else:
                        optimizer.step()
                yield item

        load(disturbed())

    monkeypatch.setattr(engine, "load", loading)
    if "another" in change:
        sync.push(verify=verify)
        return
    with pytest.raises(RefitError, match="was changed while the push was under way"):
        sync.push(verify=verify)
    assert engine.calls[-1] == "abort"
    monkeypatch.undo()
    assert sync.push().fingerprint == sync.payload.fingerprint()


def test_wrong_bytes_are_noticed() -> None:
    """An engine that ends up with one other bit is found out by the fingerprint."""
    sync, engine = pair(qwen3())
    engine.corrupt = True
    with pytest.raises(MismatchError, match="do not use its rollouts"):
        sync.push()


def test_contract_and_set_must_agree() -> None:
    """The first differing option, or tensor, is named before anything is sent."""
    model = qwen3()
    report = prepare_qat(model, ALL_LINEARS)
    other = ALL_LINEARS.merged({"compensation": {"ratio": 0.5}})
    with pytest.raises(MismatchError, match=r"compensation\.ratio: 0\.25 != 0\.5"):
        RolloutSync(model, FakeEngine(other, report.quantized))
    fewer = dict(report.quantized.shapes)
    fewer.pop("model.layers.1.mlp.experts.2.up_proj")
    with pytest.raises(MismatchError, match=r"experts\.2\.up_proj is quantized by the trainer but not by the rollout"):
        RolloutSync(model, FakeEngine(ALL_LINEARS, QuantizedSet(fewer)))
    with pytest.raises(MismatchError, match="trains with another contract"):
        RolloutSync(model, FakeEngine(ALL_LINEARS, report.quantized), contract=other)
    with pytest.raises(RefitError, match="not a rollout engine"):
        RolloutSync(model, object())
    with pytest.raises(ContractError, match="not prepared"):
        RolloutSync(qwen3(), FakeEngine(ALL_LINEARS, report.quantized))


def test_frozen_scales_are_pushed() -> None:
    """With frozen scales the pushed bytes use them, and BF16 pushes are refused."""
    model = qwen3()
    contract = Contract(weight_global_scale=WeightGlobalScale.FROZEN)
    sync, engine = pair(model, contract)
    sync.push()
    name = "model.layers.0.mlp.experts.down_proj.weight_scale_2"
    scale = engine.serving[name].clone()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1, 0, 0] = 50.0
    sync.push()
    assert torch.equal(engine.serving[name], scale)
    with pytest.raises(ContractError, match="frozen"):
        sync.push(packed=False)


def test_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    """progress=True pushes the same."""
    model = qwen3()
    prepare_qat(model)
    engine = FakeEngine(Contract(), prepare_quantized(model))
    assert RolloutSync(model, engine, progress=True).push().fingerprint == engine.fingerprint()


def prepare_quantized(model: nn.Module) -> QuantizedSet:
    """The set of a prepared model."""
    from trainer_qat.prepare import state_of

    return state_of(model).quantized
