# SPDX-License-Identifier: Apache-2.0
"""Engines whose backend keeps the experts in an order of its own: one copy of them, and all ways to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import start_engine, stop_engine
from plugin_helpers import manifest, push, quads_layers, scores, stacked, tensors_of
from torch import Tensor

pytest.importorskip("vllm")

from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin import runtime
from vllm_quads.plugin.backends import ExpertsRequest, TorchExperts
from vllm_quads.plugin.hopper import HopperExperts
from vllm_quads.plugin.installing import Installer
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.refit import Rollback, as_engine


class ArrangedReference(HopperExperts):
    """Keeps weights as on a Hopper GPU, and multiplies with the reference."""

    splits_auto = True

    def forward(self, request: ExpertsRequest) -> Tensor:
        assert self._moe is not None
        reference = TorchExperts()
        w13 = (*self.packed("w13_"), self._moe.w13_decode)
        w2 = (*self.packed("w2_"), self._moe.w2_decode[:, 0])
        reference.prepare(w13, w2, request.w13_site, request.w2_site)
        return reference.forward(request)


@pytest.fixture(scope="module")
def other(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The next policy, in BF16 and packed."""
    source = make_tiny("qwen3_moe", seed=7)
    packed = tmp_path_factory.mktemp("resident") / "q"
    quantize_checkpoint(source, packed)
    return {"bf16": source, "packed": packed}


@pytest.fixture(scope="module")
def expected(
    tiny_qwen3_moe: Path, other: dict[str, Path], module_engine: Callable[..., Any]
) -> dict[str, tuple[list[float], str]]:
    """(scores, fingerprint) of an ordinary engine with the first and with the second policy."""
    llm = module_engine(tiny_qwen3_moe)
    first = scores(llm), as_engine(llm).fingerprint()
    push(llm, tensors_of(other["packed"]), None)
    return {"first": first, "second": (scores(llm), as_engine(llm).fingerprint())}


@pytest.fixture(scope="module")
def resident(tiny_qwen3_moe: Path) -> Iterator[Any]:
    """The engine under test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "make_experts_backend", lambda device: ArrangedReference())
        llm = start_engine(tiny_qwen3_moe, seed=3)
    yield llm
    stop_engine(llm)


def storages(llm: Any) -> list[int]:
    """Addresses of what the kernels read; the packed parameters beside them are empty."""
    addresses = []
    for layer in quads_layers(llm).values():
        assert not layer.loader.is_open
        assert all(
            getattr(layer.layer, f"{p}_{s}").numel() == 0 for p in ("w13", "w2") for s in ("weight", "weight_scale")
        )
        addresses += [layer.backend.stored(prefix).data_ptr() for prefix in ("w13_", "w2_")]
    return addresses


@pytest.mark.parametrize("route", ["push", "push_experts", "load_weights", "reload_iterator", "reload_path"])
@pytest.mark.parametrize("kind", ["bf16", "packed"])
def test_every_route_changes_the_one_copy(
    route: str, kind: str, resident: Any, other: dict[str, Path], expected: Any, tiny_qwen3_moe: Path
) -> None:
    """Pushes and vLLM's own routes write new weights where the kernels read them and leave no second copy; log-probs
    and fingerprint, read back from there, are those of an engine that stores packed weights."""
    before = storages(resident)
    tensors = tensors_of(other[kind])
    if route.startswith("push"):
        push(resident, stacked(tensors) if route == "push" else tensors, expected["second"][1])
    elif route == "load_weights":
        resident.apply_model(lambda model: [model.load_weights([item]) for item in tensors.items()])
    elif route == "reload_iterator":
        resident.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    else:
        resident.collective_rpc("reload_weights", kwargs={"weights_path": str(other[kind])})
    assert scores(resident) == expected["second"][0]
    assert as_engine(resident).fingerprint() == expected["second"][1]
    assert storages(resident) == before
    push(resident, stacked(tensors_of(tiny_qwen3_moe)), expected["first"][1])
    assert scores(resident) == expected["first"][0]


@pytest.mark.parametrize("kind", ["bf16", "packed"])
def test_rollback_of_the_one_copy(
    kind: str, resident: Any, other: dict[str, Path], expected: Any, tiny_qwen3_moe: Path
) -> None:
    """A push that fails half-way, also right after one of vLLM's routes, leaves the bytes of before where they were."""
    resident.apply_model(lambda model: model.load_weights(iter(tensors_of(tiny_qwen3_moe).items())))
    engine, tensors = as_engine(resident), tensors_of(other[kind])
    engine.begin(manifest(resident, tensors, None))
    before = storages(resident)
    engine.load(list(tensors.items())[: 2 * len(tensors) // 3])
    with pytest.raises(RefitError, match="never sent; the previous weights keep serving"):
        engine.commit()
    assert storages(resident) == before
    assert engine.fingerprint() == expected["first"][1]
    assert scores(resident) == expected["first"][0]


@pytest.mark.parametrize(("suffix", "value"), [("weight_scale", 0x80), ("weight_scale_2", 0xFF)])
@pytest.mark.parametrize("rollback", list(Rollback))
def test_damage_that_is_found_while_it_is_written(
    rollback: Rollback, suffix: str, value: int, resident: Any, other: dict[str, Path], expected: Any,
    tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a GPU only the first layer is looked at before it is written; the kernels report a negative block scale or a
    NaN global scale of any other, and the commit names its layer: the old weights are put back, or nothing serves."""
    monkeypatch.setattr(Installer, "_looks_first", lambda self, refit: not refit.touched)
    push(resident, stacked(tensors_of(tiny_qwen3_moe)), expected["first"][1])
    tensors = stacked(tensors_of(other["packed"]))
    name = f"model.layers.1.mlp.experts.down_proj.{suffix}"
    tensors[name] = tensors[name].clone()
    tensors[name].view(torch.uint8).view(-1)[-tensors[name].element_size() :] = value
    outcome = "previous weights keep serving" if rollback is Rollback.HOST else "refuses to serve"
    with pytest.raises(RefitError, match=rf"{name}: .*scales; .*{outcome}"):
        push(resident, tensors, None, rollback=rollback)
    if rollback is Rollback.HOST:
        assert as_engine(resident).fingerprint() == expected["first"][1]
        assert scores(resident) == expected["first"][0]
    push(resident, stacked(tensors_of(other["packed"])), expected["second"][1])
    assert scores(resident) == expected["second"][0]


def test_layers_follow_a_refit_together(
    resident: Any, other: dict[str, Path], expected: Any, tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where captured CUDA graphs replay without Python, decode scales of all layers follow before the commit, by copies
    that are made together; layers whose bias has to be written anew are prepared one by one. Log-probs are the same."""
    push(resident, stacked(tensors_of(tiny_qwen3_moe)), expected["first"][1])
    assert scores(resident) == expected["first"][0]
    monkeypatch.setattr(LayerRuntime, "follows_in_graphs", property(lambda self: self._derived_from is not None))
    prepared: list[HopperExperts] = []
    prepare = HopperExperts.prepare
    monkeypatch.setattr(HopperExperts, "prepare", lambda self, *a, **k: prepared.append(self) or prepare(self, *a, **k))
    engine, tensors = as_engine(resident), stacked(tensors_of(other["packed"]))
    layers = list(quads_layers(resident).values())
    for bias in (False, True):
        if bias:
            layers[0].backend.forget()
        engine.begin(manifest(resident, tensors, expected["second"][1]))
        engine.load(list(tensors.items()))
        assert prepared == ([layers[0].backend] if bias else [])
        for own in layers:
            moe, layer = own.backend._moe, own.layer
            assert torch.equal(moe.w13_decode, layer.w13_weight_scale_2)
            assert torch.equal(moe.w2_decode, layer.w2_weight_scale_2[:, None].expand(-1, 2))
        engine.commit()
        assert scores(resident) == expected["second"][0]
    push(resident, stacked(tensors_of(tiny_qwen3_moe)), expected["first"][1])
    assert scores(resident) == expected["first"][0]
