# SPDX-License-Identifier: Apache-2.0
"""Refit: after a push the engine is the engine that would have loaded the pushed weights, or it is the old one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import damaged, decoded, manifest, push, quads_layers, scores, stacked, tensors_of
from torch import Tensor

pytest.importorskip("vllm")

from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, ContractError, QuadsError, QuantizedSet, RefitError, tensor_digest
from vllm_quads.plugin import compat, installing
from vllm_quads.plugin import refit as refit_module
from vllm_quads.plugin.arrivals import Arrivals
from vllm_quads.plugin.digests import DigestTable
from vllm_quads.plugin.flags import Flags
from vllm_quads.plugin.installing import Installer
from vllm_quads.plugin.loading import PackedLoader
from vllm_quads.plugin.phases import PhaseTimer
from vllm_quads.plugin.policy import config_of
from vllm_quads.plugin.refit import session_of
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.plugin.undo import UndoLog
from vllm_quads.plugin.units import Section, Unit
from vllm_quads.refit import EngineState, Lasting, Manifest, RefitReport, Rollback, as_engine

EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def other(make_tiny: Callable[..., Path]) -> Path:
    """The next policy: another random Qwen3-MoE of the same shapes."""
    return make_tiny("qwen3_moe", seed=7)


@pytest.fixture(scope="module")
def expected(
    tiny_qwen3_moe: Path, other: Path, module_engine: Callable[..., Any]
) -> dict[Path, tuple[list[float], str]]:
    """(scores, fingerprint) of engines that were started with each policy."""
    return {
        path: (scores(module_engine(path, seed=5)), as_engine(module_engine(path, seed=5)).fingerprint())
        for path in (tiny_qwen3_moe, other)
    }


@pytest.fixture
def serving(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> Any:
    """The engine under test, with the first policy's weights, whatever the test before did to it."""
    llm = module_engine(tiny_qwen3_moe, seed=6)
    as_engine(llm).abort()
    as_engine(llm).set_activation(Contract())
    as_engine(llm).set_compensation(CompensationState())
    llm.apply_model(lambda model: model.load_weights(iter(tensors_of(tiny_qwen3_moe).items())))
    return llm


def test_push_equals_a_fresh_engine(serving: Any, other: Path, expected: Any, tmp_path: Path) -> None:
    """After a push (BF16 or packed) log-probs equal those of an engine started with the exported checkpoint, bit for
    bit; the fingerprint, policy version and report say so."""
    quantize_checkpoint(other, tmp_path / "q")
    version = as_engine(serving).policy_version() + 4
    report = push(serving, tensors_of(other), expected[other][1], version=version)
    assert scores(serving) == expected[other][0]
    assert as_engine(serving).fingerprint() == report.fingerprint == expected[other][1]
    assert as_engine(serving).policy_version() == report.policy_version == version
    packed = push(serving, tensors_of(tmp_path / "q"), expected[other][1])
    assert scores(serving) == expected[other][0]
    assert packed.bytes < report.bytes


def test_two_pushes_are_bit_equal(serving: Any, other: Path, expected: Any) -> None:
    """Pushing identical weights twice changes nothing, not even the last bit."""
    push(serving, tensors_of(other), expected[other][1])
    first = scores(serving)
    push(serving, tensors_of(other), expected[other][1])
    assert scores(serving) == first == expected[other][0]


def test_later_pushes_need_no_loaders(
    serving: Any, other: Path, tiny_qwen3_moe: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not quantized is loaded by vLLM once; later pushes copy it to the same places: same log-probs."""
    push(serving, tensors_of(other), expected[other][1])

    def refused(self: Any, weights: Any) -> None:
        raise AssertionError(f"asked for {[n for n, _ in weights]}")

    model_class = serving.apply_model(type)[0]
    with monkeypatch.context() as patch:
        patch.setattr(model_class, "load_weights", refused)
        for path in (tiny_qwen3_moe, other):
            push(serving, tensors_of(path), expected[path][1])
            assert scores(serving) == expected[path][0]


def test_push_resets_the_prefix_cache(serving: Any, other: Path, expected: Any) -> None:
    """Key/value blocks of the old policy are not reused (vLLM does not reset them by itself)."""
    prompt = [11 + i % 50 for i in range(70)]
    decoded(serving, prompt)
    decoded(serving, prompt)
    push(serving, tensors_of(other), expected[other][1])
    after = decoded(serving, prompt)
    serving.reset_prefix_cache()
    assert after == decoded(serving, prompt)


@pytest.mark.parametrize("route", ["load_weights", "reload_iterator", "reload_path"])
@pytest.mark.parametrize("fmt", ["bf16", "modelopt", "compressed-tensors"])
def test_vllms_own_routes(
    route: str, fmt: str, serving: Any, other: Path, expected: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """TRL- and OpenRLHF-style `model.load_weights` one tensor at a time, and vLLM's layerwise reload, are exact too, in
    BF16 and packed, on an engine that started from BF16."""
    path = other
    if fmt != "bf16":
        path = tmp_path_factory.mktemp("routes") / fmt
        quantize_checkpoint(other, path, format=fmt)
    if route == "load_weights":
        serving.apply_model(lambda model: [model.load_weights([item]) for item in tensors_of(path).items()])
    elif route == "reload_iterator":
        serving.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors_of(path).items())})
    else:
        serving.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    assert scores(serving) == expected[other][0]
    assert as_engine(serving).fingerprint() == expected[other][1]


@pytest.mark.parametrize("fmt", ["bf16", "modelopt"])
def test_vllms_reload_settles_layer_by_layer(
    fmt: str, serving: Any, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layerwise reload processes a layer as soon as its last tensor has come, so it buffers one layer; input
    scales, which a checkpoint may or may not have, neither delay nor hasten that."""
    path = other
    if fmt != "bf16":
        quantize_checkpoint(other, tmp_path / "q", format=fmt)
        path = tmp_path / "q"
    tensors = {n: t for n, t in tensors_of(path).items() if "input_scale" not in n}
    experts = [n for n in tensors if ".experts." in n]
    for scales in (False, True) if fmt == "modelopt" else (False,):
        sent: list[str] = []
        finished: list[int] = []
        finish = PackedLoader.finish

        def noting(self: PackedLoader, **options: Any) -> None:
            finished.append(len(sent))  # noqa: B023
            finish(self, **options)  # noqa: B023

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name in sorted(experts):
                if scales and name.endswith(".weight"):  # noqa: B023
                    yield name.replace(".weight", ".input_scale"), torch.tensor(0.25)
                sent.append(name)  # noqa: B023
                yield name, tensors[name]
            yield from ((n, t) for n, t in tensors.items() if n not in experts)

        with monkeypatch.context() as patch:
            patch.setattr(PackedLoader, "finish", noting)
            serving.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        assert finished == [len(experts) // 2, len(experts)]


def test_mixtral_router_is_refit(
    tiny_mixtral: Path, make_tiny: Callable[..., Path], module_engine: Callable[..., Any]
) -> None:
    """Weights that vLLM builds without a quantization config (Mixtral's router) are reached by a refit as well."""
    other = make_tiny("mixtral", seed=3)
    llm, fresh = module_engine(tiny_mixtral), module_engine(other)
    push(llm, tensors_of(other), as_engine(fresh).fingerprint())
    assert scores(llm) == scores(fresh)


def _drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t.pop(name)


def _set(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda t: t.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("model.layers.0.mlp.experts.9.gate_proj.weight", torch.zeros(48, 64)),
            r"experts.9.gate_proj.weight: the eng",
        ),
        (_set("model.layers.0.mlp.bogus", torch.zeros(3)), r"mlp.bogus: the engine has no such tensor"),
        (_drop(f"{EXPERT}.up_proj.weight"), rf"{EXPERT}.up_proj: its weight is missing from the push"),
        (_drop("model.norm.weight"), r"model.norm.weight: is missing from the push"),
        (
            _set(f"{EXPERT}.up_proj.weight", torch.zeros(48, 32)),
            rf"{EXPERT}.up_proj.weight: has shape \(48, 32\), expected \(48, 64\)",
        ),
        (
            _set(f"{EXPERT}.up_proj.weight", torch.zeros(48, 64, dtype=torch.int32)),
            rf"{EXPERT}.up_proj.weight: is torch.int32",
        ),
        (
            _set(f"{EXPERT}.up_proj.weight", torch.zeros(48, 32, dtype=torch.uint8)),
            r"up_proj: its block scales is missing",
        ),
        (_set("model.norm.weight", torch.zeros(64, dtype=torch.uint8)), r"model.norm.weight: is torch.uint8"),
    ],
    ids=["unknown-expert", "unknown", "missing-expert", "missing-norm", "shape", "dtype", "half-packed", "plain-dtype"],
)
def test_manifest_is_checked_before_a_byte_moves(
    change: Callable[[dict[str, Tensor]], Any],
    message: str,
    serving: Any,
    other: Path,
    expected: Any,
    tiny_qwen3_moe: Path,
) -> None:
    """Unknown, missing, misshapen and mistyped tensors are refused by name at `begin`; the engine is unchanged."""
    tensors = tensors_of(other)
    change(tensors)
    with pytest.raises(RefitError, match=message):
        as_engine(serving).begin(manifest(serving, tensors, expected[other][1]))
    assert as_engine(serving).fingerprint() == expected[tiny_qwen3_moe][1]


def test_sensitivities_of_another_model(serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path) -> None:
    """A push whose sensitivities name a site that the engine does not have is refused, naming the site."""
    alien = {"model.layers.9.mlp.experts.w13": 1.0}
    with pytest.raises(RefitError, match=r"layers\.9\.mlp\.experts\.w13 is no quantized site"):
        push(serving, tensors_of(other), expected[other][1], compensation=alien)
    assert as_engine(serving).fingerprint() == expected[tiny_qwen3_moe][1]


def test_different_contracts_and_sets(serving: Any, other: Path, expected: Any) -> None:
    """Contract or quantized set that differ between trainer and rollout: the first difference is named."""
    good = manifest(serving, tensors_of(other), expected[other][1])
    changed = Contract().merged({"compensation": {"ratio": 0.5}})
    with pytest.raises(RefitError, match=r"compensation.ratio: 0.5 != 0.25"):
        as_engine(serving).begin(replace(good, contract=changed))
    fewer = QuantizedSet({n: s for n, s in good.quantized.shapes.items() if n != f"{EXPERT}.up_proj"})
    with pytest.raises(RefitError, match=rf"{EXPERT}.up_proj is quantized by the rollout but not by the trainer"):
        as_engine(serving).begin(replace(good, quantized=fewer))


def test_interrupted_push_changes_nothing(serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path) -> None:
    """A push that stops half-way, or breaks at any later point, leaves the previous weights serving."""
    tensors = tensors_of(other)
    engine = as_engine(serving)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    engine.load(list(tensors.items())[: len(tensors) // 2])
    with pytest.raises(RefitError, match="cannot serve: a refit to policy version .* is under way"):
        scores(serving)
    with pytest.raises(RefitError, match="was promised by the manifest but never sent"):
        engine.commit()
    assert scores(serving) == expected[tiny_qwen3_moe][0]

    bad = dict(tensors) | {"model.norm.weight": torch.full((64,), float("nan"), dtype=torch.bfloat16)}
    with pytest.raises(RefitError, match=r"model.norm.weight: holds NaN or Inf"):
        push(serving, bad, expected[other][1])

    with pytest.raises(RefitError, match="fingerprint .* the previous weights keep serving"):
        push(serving, tensors, "0123456789abcdef", version=99)
    assert scores(serving) == expected[tiny_qwen3_moe][0]
    assert engine.fingerprint() == expected[tiny_qwen3_moe][1]
    assert engine.policy_version() != 99
    push(serving, tensors, expected[other][1])
    assert scores(serving) == expected[other][0]


def test_stacks_of_experts(serving: Any, other: Path, expected: Any, tmp_path: Path) -> None:
    """Experts sent as stacks, BF16 or packed, give what the same weights expert by expert do, in fewer tensors; so does
    a manifest that has travelled as JSON."""
    quantize_checkpoint(other, tmp_path / "q")
    for path, kind in ((other, "bf16"), (tmp_path / "q", "packed")):
        single, tensors = tensors_of(path), stacked(tensors_of(path))
        assert len(tensors) < 0.7 * len(single)
        engine = as_engine(serving)
        made = manifest(serving, tensors, expected[other][1])
        travelled = json.loads(json.dumps(made.to_json()))
        assert len(travelled["quantized"]) == 4
        assert Manifest.from_json(travelled) == made
        engine.begin(Manifest.from_json(travelled))
        for item in tensors.items():
            engine.load([item])
        report = engine.commit()
        assert (report.payload, report.fingerprint) == (kind, expected[other][1])
        assert RefitReport.from_json(json.loads(json.dumps(report.to_json()))) == report
        assert scores(serving) == expected[other][0]


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Every tensor of a dataclass or tuple, depth first."""
    if isinstance(obj, Tensor):
        yield obj
    elif dataclasses.is_dataclass(obj):
        for item in dataclasses.fields(obj):
            yield from tensors_in(getattr(obj, item.name))
    elif isinstance(obj, (tuple, list)):
        for item in obj:
            yield from tensors_in(item)


def test_derived_operands_equal_those_of_a_fresh_engine(
    serving: Any, other: Path, expected: Any, module_engine: Callable[..., Any]
) -> None:
    """Every buffer and every operand that is computed from weights has the bits of a fresh load, at its old address."""
    before = {n: p.data_ptr() for n, p in serving.apply_model(lambda m: list(m.named_parameters()))[0]}
    push(serving, stacked(tensors_of(other)), expected[other][1])
    assert before == {n: p.data_ptr() for n, p in serving.apply_model(lambda m: list(m.named_parameters()))[0]}
    fresh = quads_layers(module_engine(other, seed=5))
    for key, runtime in quads_layers(serving).items():
        runtime.settle()
        fresh[key].settle()
        mine, theirs = (list(tensors_in(r.backend._prepared)) for r in (runtime, fresh[key]))
        pairs = list(zip(mine, theirs, strict=True))
        assert len(pairs) >= 2
        for a, b in (*pairs, *zip(runtime.buffers(), fresh[key].buffers(), strict=True)):
            assert torch.equal(a, b)


def test_swapped_gate_and_up_are_named(serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path) -> None:
    """What no shape can show, the digests do: the error names the stack, and the previous weights keep serving."""
    tensors = stacked(tensors_of(other))
    push(serving, tensors, None)
    good = as_engine(serving).status().report
    assert good is not None
    assert not good.verified
    serving.apply_model(lambda model: model.load_weights(iter(tensors_of(tiny_qwen3_moe).items())))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    swapped = tensors | {name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)}
    engine = as_engine(serving)
    engine.begin(manifest(serving, swapped, None))
    engine.load(swapped.items())
    with pytest.raises(RefitError, match=rf"{name}: the rollout arrived at other bytes.*previous weights keep serving"):
        engine.commit(good.digests)
    assert scores(serving) == expected[tiny_qwen3_moe][0]
    engine.begin(manifest(serving, tensors, None))
    engine.load(tensors.items())
    report = engine.commit(good.digests)
    assert (report.verified, report.fingerprint_verified) == (False, True)  # nothing is known of the other tensors
    assert "verified for the quantized weights alone" in str(report)


def test_digests_of_what_is_not_quantized(serving: Any, other: Path, tiny_qwen3_moe: Path, expected: Any) -> None:
    """Tensors that are not quantized are compared by their bytes as they were sent, whatever their dtype, in whatever
    messages they came; a tensor that is missing on one side, and digests that nobody computed, are errors."""
    engine = as_engine(serving)
    tensors = stacked(tensors_of(other))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    plain = {n: int(tensor_digest(t)) % 2**64 for n, t in tensors.items() if ".experts." not in n}

    def commit(verify: bool = True, **digests: int) -> RefitReport:
        engine.begin(manifest(serving, tensors, expected[other][1], verify=verify))
        items = list(tensors.items())
        for start in range(0, len(items), 4):
            engine.load(items[start : start + 4])
        return engine.commit(plain=plain | digests)

    assert commit().verified
    assert scores(serving) == expected[other][0]
    before = engine.status().report
    for name in ("model.norm.weight", "model.another.weight"):
        with pytest.raises(RefitError, match=rf"{name}: arrived with other bytes .* != 0000000000000005.*keep serving"):
            commit(**{name: 5})
    with pytest.raises(RefitError, match="verify=False; leave them out.*keep serving"):
        commit(verify=False)
    assert engine.status().report == before


def test_experts_that_vllm_rearranged_are_refused(
    tiny_qwen3_moe: Path, other: Path, module_engine: Callable[..., Any]
) -> None:
    """Experts that stay in BF16 are refitted where vLLM reads them as they were loaded; on a CPU it reads a copy of its
    own, which a refit does not reach: refused by name, instead of serving two policies."""
    llm = module_engine(tiny_qwen3_moe, additional_config={"quads": {"keep_first_layers": 1}})
    with pytest.raises(RefitError, match=r"layers\.0\.mlp\.experts\..*these experts stay in BF16.*for its CPU kernels"):
        push(llm, tensors_of(other), None)


@pytest.mark.parametrize(
    ("kind", "suffix", "value", "message"),
    [
        ("bf16", "", torch.inf, r"gate_up_proj: holds NaN or Inf; the trainer has diverged"),
        ("q", ".weight_scale", torch.nan, r"gate_up_proj\.weight_scale: holds NaN or negative block scales"),
        ("q", ".weight_scale", -1.0, r"gate_up_proj\.weight_scale: holds NaN or negative block scales"),
        ("q", ".weight_scale_2", torch.nan, r"gate_up_proj\.weight_scale_2: expected finite, positive scales"),
        ("q", ".weight_scale_2", 0.0, r"gate_up_proj\.weight_scale_2: expected finite, positive scales"),
    ],
)
def test_one_damaged_value_among_all_experts(
    kind: str, suffix: str, value: float, message: str, serving: Any, other: Path, expected: Any, tmp_path: Path,
    tiny_qwen3_moe: Path,
) -> None:  # fmt: skip
    """One NaN, Inf, negative or zero value in the last expert of a stack is found and named; nothing changes."""
    path = other
    if kind == "q":
        path = tmp_path / "q"
        quantize_checkpoint(other, path)
    tensors = stacked(tensors_of(path))
    name = f"model.layers.1.mlp.experts.gate_up_proj{suffix}"
    damaged_tensor = tensors[name].clone()
    last = torch.tensor([value]).to(damaged_tensor.dtype)
    damaged_tensor.view(-1).view(torch.uint8)[-last.element_size() :] = last.view(torch.uint8)
    with pytest.raises(RefitError, match=rf"{message}.*previous weights keep serving"):
        push(serving, tensors | {name: damaged_tensor}, None)
    assert as_engine(serving).fingerprint() == expected[tiny_qwen3_moe][1]


def _everything(llm: Any) -> dict[str, Tensor]:
    """Every parameter, buffer, input scale and piece of compensation state, copied, as bytes."""

    def copied(model: Any) -> dict[str, Tensor]:
        config = config_of(model)
        out = dict(model.named_parameters()) | dict(model.named_buffers())
        for key, runtime in config.runtimes.items():
            out |= {f"{key} input {n}": t for n, t in runtime.loader._input_scales.items()}
        out["sensitivities"] = torch.tensor(list(config.sensitivities.values()))
        return {n: t.detach().contiguous().clone().view(-1).view(torch.uint8) for n, t in out.items()}

    return llm.apply_model(copied)[0]


STEPS = (
    (Arrivals, "accept"), (Flags, "check"), (UndoLog, "save"), (Unit, "write_packed"),
    (Unit, "write_input_scales"), (Section, "digest"), (DigestTable, "read"), (PackedLoader, "replaced"),
    (LayerRuntime, "settle_for_graphs"), (installing, "settle_together"), (compat, "absorb_latent_attention"),
    (refit_module, "refresh_compensation"), (compat, "gather"), (Installer, "_load_plain"),
    (refit_module, "compare_digests"),
)  # fmt: skip
"""What a refit calls between its manifest and the switch."""


def _fails_in(
    owner: Any, name: str, error: BaseException, patch: pytest.MonkeyPatch, attempt: Callable[[], None]
) -> None:
    """Run an attempt in which this function raises once, as late as it is sure to be called."""
    original, calls = getattr(owner, name), []
    once = ("read", "absorb_latent_attention", "refresh_compensation", "gather", "compare_digests", "_load_plain",
            "settle_together", "write_input_scales")  # fmt: skip
    last = 1 if name in once else 2

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == last:  # once: the rollback takes some of the same steps
            raise error
        return original(*args, **kwargs)

    with patch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises((RefitError, KeyboardInterrupt)):
            attempt()
    assert len(calls) >= last


@pytest.mark.parametrize("error", [OSError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_in_any_step(
    error: BaseException, serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever step fails, every byte is that of before (weights, plain parameters, input scales, channel sets,
    centring, sensitivities) and the engine serves. Without an undo log it refuses, and what no push brings (input
    scales, compensation) is that of before."""
    engine = as_engine(serving)
    quantize_checkpoint(other, tmp_path / "q")
    tensors = tensors_of(tmp_path / "q") | {f"{EXPERT}.gate_proj.input_scale": torch.tensor(0.5)}
    engine.collect_statistics()
    scores(serving)
    engine.collect_statistics(False)
    sensitivities = {name: 1.0 + i for i, name in enumerate(engine.compensation().sites)}
    before = _everything(serving)

    def attempt(rollback: Rollback) -> None:
        announced = manifest(serving, tensors, expected[other][1], rollback=rollback, compensation=sensitivities)
        engine.begin(announced)
        try:
            engine.load(reversed(tensors.items()))
            engine.commit()
        except KeyboardInterrupt:
            engine.abort()
            raise

    for owner, name in STEPS:
        _fails_in(owner, name, error, monkeypatch, lambda: attempt(Rollback.HOST))
        after = _everything(serving)
        assert after.keys() == before.keys(), name
        assert [n for n in before if not torch.equal(before[n], after[n])] == [], name
        assert engine.status().state is EngineState.SERVING
    assert engine.fingerprint() == expected[tiny_qwen3_moe][1]
    _fails_in(refit_module, "compare_digests", error, monkeypatch, lambda: attempt(Rollback.NONE))
    assert engine.status().state is EngineState.REFUSING
    after = _everything(serving)
    kept = [n for n in before if "input" in n or "center" in n or "blocks" in n or n == "sensitivities"]
    assert [n for n in kept if not torch.equal(before[n], after[n])] == []
    push(serving, tensors_of(other), expected[other][1])
    assert engine.status().state is EngineState.SERVING


def test_a_broken_metric_decides_nothing(serving: Any, other: Path, expected: Any) -> None:
    """An observer that raises changes neither how a refit ends nor what its caller is told."""

    class Broken:
        def committed(self, report: RefitReport) -> None:
            raise OSError("no space left on device")

        def ended(self, outcome: str, reason: str) -> None:
            raise OSError("no space left on device")

    def observe(model: Any, observer: Any) -> Any:
        session = session_of(model)
        before, session.observer = session.observer, observer
        return before

    before = serving.apply_model(lambda model: observe(model, Broken()))[0]
    try:
        report = push(serving, tensors_of(other), expected[other][1])
        assert as_engine(serving).fingerprint() == report.fingerprint
        with pytest.raises(RefitError, match="previous weights keep serving"):
            push(serving, tensors_of(other), "0123456789abcdef")
        with pytest.raises(RefitError, match="is not newer"):
            push(serving, tensors_of(other), None, version=0)
    finally:
        serving.apply_model(lambda model: observe(model, before))


def test_manifests_that_were_tampered_with(serving: Any, other: Path) -> None:
    """Versions that are no integers, unknown ways back and sensitivities that are no numbers are refused, not rounded
    or ignored."""
    good = manifest(serving, tensors_of(other), None)
    site = next(iter(as_engine(serving).compensation().sites))
    for changed in ({"policy_version": 7.9}, {"policy_version": True}, {"policy_version": "7"}, {"rollback": "maybe"}):
        (key,) = changed
        with pytest.raises(RefitError, match=f"{key}: is .*, expected"):
            Manifest.from_json(good.to_json() | changed)
    for value in (torch.nan, torch.inf, -1.0):
        with pytest.raises(RefitError, match=r"sensitivities\['model.*expected a finite number"):
            as_engine(serving).begin(Manifest.from_json(good.to_json() | {"compensation": {site: value}}))


@pytest.mark.parametrize(
    "field",
    [{"version": torch.inf}, {"version": torch.nan}, {"version": True}, {"version": -1}, {"rollback": "maybe"}],
    ids=str,
)
def test_manifests_made_by_hand(field: dict[str, Any], serving: Any, other: Path) -> None:
    """No version that nothing could be newer than, and no way back that would silently be none."""
    key = {"version": "policy_version"}.get(next(iter(field)), "rollback")
    with pytest.raises(RefitError, match=f"{key}: is .*, expected"):
        manifest(serving, tensors_of(other), None, **field)
    assert manifest(serving, tensors_of(other), None, rollback="host").rollback is Rollback.HOST


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_damaged_activation_scales(
    value: float, serving: Any, other: Path, expected: Any, tmp_path: Path, tiny_qwen3_moe: Path
) -> None:
    """A static activation scale that a checkpoint could not have is refused by a push too."""
    quantize_checkpoint(other, tmp_path / "q")
    name = f"{EXPERT}.gate_proj.input_scale"
    message = r"gate_proj\.input_scale: expected a finite, positive scale; the previous weights keep serving"
    with pytest.raises(RefitError, match=message):
        push(serving, tensors_of(tmp_path / "q") | {name: torch.tensor(value)}, None)
    assert scores(serving) == expected[tiny_qwen3_moe][0]


def test_what_overflows_the_engines_dtype(serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path) -> None:
    """FP32 numbers that round to Inf in BF16 are refused, quantized or not."""
    for name in ("lm_head.weight", f"{EXPERT}.gate_proj.weight"):
        tensors = {n: t.float() for n, t in tensors_of(other).items()}
        tensors[name][3, 5] = 3.4e38
        with pytest.raises(RefitError, match=r"holds NaN or Inf.*previous weights keep serving"):
            push(serving, tensors, None)
        assert scores(serving) == expected[tiny_qwen3_moe][0]


@pytest.mark.parametrize("call", ["abort", "commit", "load", "abort, begin"])
def test_a_refit_that_ends_while_it_receives(
    call: str, serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path
) -> None:
    """What still arrives after a refit has ended (by its sender, or by another thread) is not written."""
    engine, tensors = as_engine(serving), list(stacked(tensors_of(other)).items())
    announced = manifest(serving, dict(tensors), None)

    def sender(end: int) -> Iterator[tuple[str, Tensor]]:
        yield from tensors[:end]
        if call == "commit":
            with pytest.raises(RefitError, match="still being received"):
                engine.commit()
        elif call == "load":
            with pytest.raises(RefitError, match="still being received"):
                engine.load(tensors[end:])
        else:
            engine.abort()
        if call == "abort, begin":
            engine.begin(announced)
        yield from tensors[end:]

    for end in (0, len(tensors) - 1, len(tensors)):
        engine.begin(announced)
        with pytest.raises(RefitError, match="the refit has failed before.*previous weights keep serving"):
            engine.load(sender(end))
        engine.abort()
        assert scores(serving) == expected[tiny_qwen3_moe][0]
        assert engine.fingerprint() == expected[tiny_qwen3_moe][1]
    assert push(serving, dict(tensors), None).fingerprint == expected[other][1]


def test_another_thread_ends_a_refit_amid_a_write(
    serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort by another thread waits for the write that is under way, undoes it, and nothing is written after it."""
    engine, tensors = as_engine(serving), stacked(tensors_of(other))
    install, threads = Installer._install, list[threading.Thread]()

    def amid(self: Installer, refit: Any, arrivals: Any) -> None:
        if refit.touched and not threads:
            threads.append(threading.Thread(target=engine.abort))
            threads[0].start()
            threads[0].join(0.2)
            assert threads[0].is_alive(), "the refit has ended while a unit is being written"
        install(self, refit, arrivals)

    monkeypatch.setattr(Installer, "_install", amid)
    engine.begin(manifest(serving, tensors, None))
    with contextlib.suppress(RefitError):  # or all is written before the thread gets its turn
        engine.load(tensors.items())
    threads[0].join()
    assert scores(serving) == expected[tiny_qwen3_moe][0]
    assert engine.fingerprint() == expected[tiny_qwen3_moe][1]
    with pytest.raises(RefitError, match="the refit was aborted; the previous weights keep serving"):
        engine.commit()


def test_versions_only_grow(serving: Any, other: Path, expected: Any) -> None:
    """A version that is not newer than the one that serves is refused, and counted."""
    engine = as_engine(serving)
    push(serving, tensors_of(other), expected[other][1])
    version, refused = engine.policy_version(), engine.status().counters.refused
    for stale in (version, version - 1):
        with pytest.raises(RefitError, match=rf"policy version {stale} is not newer than {version}"):
            push(serving, tensors_of(other), expected[other][1], version=stale)
    assert engine.status().counters.refused == refused + 2
    assert engine.status().state is EngineState.SERVING


@pytest.mark.parametrize("failure", ["half", "nan", "fingerprint"])
def test_without_an_undo_log_a_failed_refit_refuses_to_serve(
    failure: str, serving: Any, other: Path, expected: Any
) -> None:
    """rollback="none": after a failure every request raises an error that says why, until a complete refit; a NaN that
    comes first is noticed before anything is written, so that the previous weights keep serving."""
    engine, tensors = as_engine(serving), tensors_of(other)
    before = scores(serving)
    if failure == "nan":
        tensors = {"model.norm.weight": torch.full((64,), torch.nan, dtype=torch.bfloat16)} | tensors
        tensors["model.norm.weight"] = torch.full((64,), torch.nan, dtype=torch.bfloat16)
    wrong = "0123456789abcdef" if failure == "fingerprint" else None
    engine.begin(manifest(serving, tensors, wrong, rollback=Rollback.NONE))
    if failure == "nan":
        with pytest.raises(RefitError, match=r"model.norm.weight: holds NaN or Inf.*previous weights keep serving"):
            engine.load([("model.norm.weight", tensors["model.norm.weight"])])
        assert scores(serving) == before
        return
    engine.load(list(tensors.items())[: len(tensors) // 2 if failure == "half" else None])
    with pytest.raises(RefitError, match="refuses to serve until a complete refit succeeds"):
        engine.commit()
    for _ in range(2):
        with pytest.raises(RefitError, match=r"cannot serve: a refit to policy version \d+ failed"):
            scores(serving)
        assert not serving.llm_engine.has_unfinished_requests()  # vLLM would go on after tokens that never were
    # Nor is anything sampled from a pass that did not ask, as in a graph that replays all layers.
    hidden = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(RefitError, match="cannot serve"):
        serving.apply_model(lambda model: model.logits_processor(model.lm_head, hidden))
    assert engine.status().state is EngineState.REFUSING
    with pytest.raises(RefitError, match="is missing from the push"):
        push(serving, {}, None)
    assert engine.status().state is EngineState.REFUSING
    push(serving, tensors_of(other), expected[other][1])
    assert scores(serving) == expected[other][0]
    assert engine.status().state is EngineState.SERVING


def test_a_failed_rollback_refuses_to_serve(
    serving: Any, other: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If putting the old weights back fails as well, or puts other bytes back, nothing serves until the next push."""
    for breaks in (lambda self: None, lambda self: 1 / 0):
        with monkeypatch.context() as patch:
            patch.setattr(UndoLog, "restore", breaks)
            with pytest.raises(RefitError, match=r"so did its rollback.*refuses to serve until a complete refit"):
                push(serving, tensors_of(other), "0123456789abcdef")
        with pytest.raises(RefitError, match="this engine cannot serve"):
            scores(serving)
        push(serving, tensors_of(other), expected[other][1])
        assert scores(serving) == expected[other][0]


def test_an_interrupt_is_rolled_back(
    serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two layers stays an interrupt, and the previous weights serve on, input scales included."""
    tensors = tensors_of(other) | {f"{EXPERT}.gate_proj.input_scale": torch.tensor(0.5)}
    loader = quads_layers(serving)["quads.model.layers.1.mlp.experts"].loader
    kept = dict(loader._input_scales)
    original, calls = Section.digest, []

    def interrupted(self: Section, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        original(self, *args)

    engine = as_engine(serving)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    monkeypatch.setattr(Section, "digest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.load(reversed(tensors.items()))
    monkeypatch.undo()
    assert scores(serving) == expected[tiny_qwen3_moe][0]
    assert engine.fingerprint() == expected[tiny_qwen3_moe][1]
    assert loader._input_scales == kept
    push(serving, tensors, expected[other][1])
    assert set(loader._input_scales) == {*kept, f"{EXPERT}.gate_proj"}
    assert loader._input_scales[f"{EXPERT}.gate_proj"] == 0.5


def test_fifty_refits_do_not_grow_or_drift(serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path) -> None:
    """Fifty pushes in a row, BF16 and packed, failed ones among them: no tensor more, no memory more, the same bits."""
    policies = [stacked(tensors_of(path)) for path in (tiny_qwen3_moe, other)]
    prints = [expected[path][1] for path in (tiny_qwen3_moe, other)]

    def rounds(count: int) -> tuple[int, int]:
        for i in range(count):
            if i % 10 == 9:
                with pytest.raises(RefitError, match="previous weights keep serving"):
                    push(serving, policies[0], "0123456789abcdef")
            report = push(serving, policies[i % 2], prints[i % 2])
            assert report.fingerprint == prints[i % 2]
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, Tensor)]
        return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu")

    first = rounds(10)
    assert rounds(40) == first
    assert scores(serving) == expected[other][0]


def test_failure_inside_the_swap_is_rolled_back(
    serving: Any, other: Path, expected: Any, tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while vLLM copies weights leaves all of the old ones, bit for bit."""
    original, calls = Unit.write_quantized, []

    def failing(self: Any, *args: Any) -> None:
        calls.append(args)
        original(self, *args)
        if len(calls) == 3:
            raise RuntimeError("link down")

    monkeypatch.setattr(Unit, "write_quantized", failing)
    with pytest.raises(RefitError, match="RuntimeError: link down.*previous weights keep serving"):
        push(serving, tensors_of(other), expected[other][1])
    monkeypatch.undo()
    assert scores(serving) == expected[tiny_qwen3_moe][0]


def test_half_sent_pair_is_noticed(serving: Any, other: Path) -> None:
    """With vLLM's raw route nothing announces the end: a gate without its up is an error before it can serve."""
    name = f"{EXPERT}.gate_proj.weight"
    serving.apply_model(lambda model: model.load_weights([(name, tensors_of(other)[name])]))
    runtime = quads_layers(serving)["quads.model.layers.1.mlp.experts"]
    with pytest.raises(RefitError, match=rf"{EXPERT}.up_proj.weight: was not sent"):
        runtime.settle()
    runtime.loader.forget_partial()


def test_buffers_of_the_sender_may_be_reused(serving: Any, other: Path, expected: Any) -> None:
    """Senders overwrite their buckets after each tensor; nothing in the engine refers to them."""
    tensors = tensors_of(other)
    buffer = torch.empty(max(t.numel() for t in tensors.values()), dtype=torch.bfloat16)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    serving.apply_model(lambda model: model.load_weights(stream()))
    assert scores(serving) == expected[other][0]
    engine = as_engine(serving)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    engine.load(stream())
    engine.commit()
    assert scores(serving) == expected[other][0]


def test_lasting_tensors_are_read_where_they_lie(
    serving: Any, other: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that nobody overwrites (`Lasting`, what a push in the same process sends) are not copied to wait for the
    rest of their layer, and what serves are not they but their contents."""
    quantize_checkpoint(other, tmp_path / "q")
    tensors = stacked(tensors_of(tmp_path / "q"))
    engine = as_engine(serving)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "own", None)
        engine.load(Lasting(tensors.items()))
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
    engine.commit()
    assert scores(serving) == expected[other][0]


def test_compensation_is_refreshed_by_a_push_and_travels(
    serving: Any, other: Path, expected: Any, tmp_path: Path, module_engine: Callable[..., Any]
) -> None:
    """Statistics gathered while generating choose new channel sets and centring at the push, not before; a fresh engine
    that loads the exported checkpoint with the state beside it has the same log-probs, bit for bit."""
    engine = as_engine(serving)
    engine.collect_statistics()
    before = scores(serving)
    assert not any(bool(s.blocks.any() or s.center.any()) for s in engine.compensation().sites.values())
    engine.collect_statistics(False)
    assert scores(serving) == before
    sensitivities = {name: 1.0 + i for i, name in enumerate(engine.compensation().sites)}
    push(serving, tensors_of(other), expected[other][1], compensation=sensitivities)
    state = engine.compensation()
    assert any(bool(s.blocks.any()) for s in state.sites.values())
    assert bool(state.sites["model.layers.0.mlp.experts.w13"].center.any())
    assert state.sensitivities == {n: float(v) for n, v in sensitivities.items()}
    after = scores(serving)
    assert after != expected[other][0]

    exported = damaged(other, tmp_path / "export", lambda t: None)
    state.save(exported)
    assert scores(module_engine(exported)) == after
    push(serving, tensors_of(other), expected[other][1])  # no statistics since: state and scores stay
    assert scores(serving) == after


def test_switching_the_activation_path(
    serving: Any, expected: Any, tiny_qwen3_moe: Path, module_engine: Callable[..., Any]
) -> None:
    """Scheme, activation and compensation options switch on a running engine; what decides the weights does not."""
    engine = as_engine(serving)
    engine.set_activation(Contract().merged({"scheme": "w4a16"}))
    w4a16 = scores(serving)
    engine.set_activation(Contract().merged({"compensation": {"form": "rows"}}))
    rows = scores(serving)
    engine.set_activation(Contract().merged({"compensation": {"form": "none"}}))
    plain = scores(serving)
    engine.set_activation(Contract())
    assert scores(serving) == expected[tiny_qwen3_moe][0]
    distance = [sum(abs(a - b) for a, b in zip(w4a16, x, strict=True)) for x in (rows, plain)]
    assert distance[0] < 0.5 * distance[1]
    with pytest.raises(ContractError, match="targets"):
        engine.set_activation(Contract().merged({"targets": ["*.experts.*.down_proj"]}))
    uncalibrated = as_engine(module_engine(tiny_qwen3_moe, seed=5))
    with pytest.raises(ContractError, match=r"global_scale: 'static' needs the input_scale"):
        uncalibrated.set_activation(Contract().merged({"activation": {"global_scale": "static"}}))


def test_engine_protocol_errors(serving: Any, other: Path, expected: Any) -> None:
    """Calls out of order, and objects that are no engine, get an error that says what to do."""
    engine = as_engine(serving)
    assert engine is as_engine(serving)
    with pytest.raises(RefitError, match=r"call begin\(manifest\) first"):
        engine.commit()
    engine.begin(manifest(serving, tensors_of(other), expected[other][1]))
    with pytest.raises(RefitError, match="already under way"):
        engine.begin(manifest(serving, tensors_of(other), expected[other][1]))
    with pytest.raises(RefitError, match="is not in the manifest"):
        engine.load([("model.other", torch.zeros(1))])
    with pytest.raises(QuadsError, match="nothing to choose from"):
        engine.refresh_compensation()
    with pytest.raises(RefitError, match="is not a rollout engine that QUADS knows"):
        as_engine(object())


def test_requests_added_during_a_refit(serving: Any, other: Path, expected: Any) -> None:
    """A request that arrives during a refit is answered by one policy: by the new one if nothing of it was computed,
    else the refit does not happen."""
    from vllm import SamplingParams

    def finish(llm: Any) -> list[float]:
        done = []
        for _ in range(20):
            done += [o for o in llm.llm_engine.step() if o.finished]
            if not llm.llm_engine.has_unfinished_requests():
                break
        return [next(iter(e.values())).logprob for o in done for e in o.outputs[0].logprobs]

    engine, tensors = as_engine(serving), tensors_of(other)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    engine.load(tensors.items())
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=0, detokenize=False)
    serving.llm_engine.add_request("late", {"prompt_token_ids": [3, 4, 5]}, params)
    engine.commit()
    late = finish(serving)
    before = scores(serving)
    serving.llm_engine.add_request("later", {"prompt_token_ids": [3, 4, 5]}, params)
    assert finish(serving) == late
    serving.llm_engine.add_request("early", {"prompt_token_ids": [3, 4, 5]}, params)
    with pytest.raises(RefitError, match="has unfinished requests"):
        engine.begin(manifest(serving, tensors, expected[other][1]))
    finish(serving)
    engine.begin(manifest(serving, tensors, expected[other][1]))
    serving.llm_engine.add_request("between", {"prompt_token_ids": [3, 4, 5]}, params)
    serving.llm_engine.step()  # now some of it has been computed by the old weights
    with pytest.raises(RefitError, match="unfinished requests.*previous weights keep serving"):
        engine.load(tensors.items())
    finish(serving)
    assert scores(serving) == before


def test_phases_of_a_device_share_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a phase lasts until another one begins or the timer rests; work that belongs to none is not counted, and
    one event is both end and beginning."""
    clock = [0.0]

    class Event:
        count = 0

        def __init__(self, enable_timing: bool) -> None:
            Event.count += 1

        def record(self, stream: Any) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1000

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    timer = PhaseTimer(torch.device("cuda"))
    for name, seconds in (("install", 1), ("install", 2), ("derive", 4), ("rest", 8), ("install", 16), ("rest", 0)):
        if name == "rest":
            timer.rest()
            clock[0] += seconds
            continue
        with timer.phase(name):
            clock[0] += seconds
    assert timer.seconds() == {"install": 19, "derive": 4}
    assert Event.count == 5
