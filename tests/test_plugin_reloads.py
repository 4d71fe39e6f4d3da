# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own reload leaves when it fails, what a refused request leaves, and parameters that were replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import manifest, push, scores, tensors_of
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm import SamplingParams

from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit import as_engine

Tensors = dict[str, Tensor]
EXPERT = "model.layers.1.mlp.experts.1"
REFUSES = "cannot serve: a reload has"


@pytest.fixture(scope="module")
def policies(tiny_qwen3_moe: Path, make_tiny: Callable[..., Path]) -> list[Tensors]:
    """Two checkpoints of one model: experts after everything else, all up projections before the others."""

    def order(name: str) -> int:
        return 2 * (".experts." in name) - ("up_proj" in name)

    paths = (tiny_qwen3_moe, make_tiny("qwen3_moe", seed=11))
    return [dict(sorted(tensors_of(path).items(), key=lambda item: order(item[0]))) for path in paths]


@pytest.fixture(scope="module")
def llm(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> Any:
    """The engine under test, at first with the first checkpoint. Every test leaves one that serves."""
    return module_engine(tiny_qwen3_moe, seed=31)


@pytest.fixture(scope="module")
def expected(llm: Any, policies: list[Tensors]) -> list[list[float]]:
    """Log-probs of either checkpoint, from reloads that did not fail."""
    out = []
    for tensors in reversed(policies):
        reload(llm, tensors)
        out.append(scores(llm))
    assert out[0] != out[1]
    return out[::-1]


def reload(llm: Any, tensors: Any) -> None:
    """vLLM's own layerwise reload."""
    items = tensors.items() if isinstance(tensors, dict) else tensors
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)})


def refuses(llm: Any, match: str) -> None:
    """A request is refused, and so is the next one; neither stays in the engine."""
    for _ in range(2):
        with pytest.raises(RefitError, match=match):
            scores(llm)
        assert not llm.llm_engine.has_unfinished_requests()


def nan_in_an_expert(tensors: Tensors) -> Any:
    weight = tensors[f"{EXPERT}.up_proj.weight"].clone()
    weight[3, 3] = torch.nan
    return tensors | {f"{EXPERT}.up_proj.weight": weight}


def without_a_tensor(tensors: Tensors) -> Any:
    return {n: t for n, t in tensors.items() if n != f"{EXPERT}.up_proj.weight"}


def shape_of_a_norm(tensors: Tensors) -> Any:
    return tensors | {"model.layers.1.input_layernorm.weight": torch.ones(3)}


def shape_of_an_expert(tensors: Tensors) -> Any:
    return tensors | {f"{EXPERT}.down_proj.weight": torch.ones(3, 5)}


def source_dies(at: Callable[[str], bool], error: BaseException) -> Callable[[Tensors], Any]:
    def broken(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if at(name):
                raise error
            yield name, tensor

    return broken


FAILURES = {
    "nan": nan_in_an_expert,
    "missing": without_a_tensor,
    "norm": shape_of_a_norm,
    "expert": shape_of_an_expert,
    "early": source_dies(lambda name: "k_proj" in name, OSError("connection lost")),
    "late": source_dies(lambda name: name == f"{EXPERT}.down_proj.weight", OSError("connection lost")),
    "interrupt": source_dies(lambda name: name == f"{EXPERT}.down_proj.weight", KeyboardInterrupt()),
}


@pytest.mark.parametrize("asked_between", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_reload_that_fails_leaves_nothing_for_the_next(
    failure: str, asked_between: bool, llm: Any, policies: list[Tensors], expected: list[list[float]]
) -> None:
    """Wherever a reload fails, the engine refuses; an incomplete reload after it is not completed by tensors of the
    failed one, and a complete one is exact."""
    first, second = policies
    with pytest.raises(BaseException):  # noqa: B017 (whatever it was)
        reload(llm, FAILURES[failure](second))
    if asked_between:
        refuses(llm, REFUSES)
        assert as_engine(llm).status().state.value == "refusing"
    with pytest.raises(Exception, match=r"experts\.0\.up_proj.weight: is missing"):
        reload(llm, {n: t for n, t in first.items() if n != "model.layers.1.mlp.experts.0.up_proj.weight"})
    if asked_between:
        refuses(llm, REFUSES)
    reload(llm, first)
    assert scores(llm) == expected[0]


@pytest.mark.parametrize("failure", ["nan", "norm", "late"])
def test_a_push_ends_a_reload_that_failed(
    failure: str, llm: Any, policies: list[Tensors], expected: list[list[float]]
) -> None:
    """A push is the other way out of a failed reload: a failed push leaves the refusal, a good one is exact."""
    with pytest.raises(Exception):  # noqa: B017
        reload(llm, FAILURES[failure](policies[0]))
    with pytest.raises(RefitError, match="still refuses"):
        push(llm, policies[1] | {"model.norm.weight": torch.full((64,), torch.nan)}, None)
    refuses(llm, REFUSES)
    push(llm, policies[1], None)
    assert scores(llm) == expected[1]
    assert as_engine(llm).status().state.value == "serving"


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("way", ["reload", "failed reload", "load_weights"])
def test_weights_that_come_amid_a_push_are_noticed(
    way: str, commits: bool, llm: Any, policies: list[Tensors], expected: list[list[float]]
) -> None:
    """Weights that are loaded in another way between the tensors of a push and its end: it neither commits nor claims
    that the previous weights were restored; nothing serves until the next push."""
    push(llm, policies[0], None)
    engine, items = as_engine(llm), list(policies[1].items())
    others = {n: 1.5 * t for n, t in policies[0].items()}
    engine.begin(manifest(llm, policies[1], None))
    engine.load(items if commits else items[: len(items) // 2])
    if way == "load_weights":
        llm.apply_model(lambda model: model.load_weights(iter(others.items())))
    elif way == "reload":
        reload(llm, others)
    else:
        with pytest.raises(OSError, match="connection lost"):
            reload(llm, FAILURES["late"](others))
    if commits:
        with pytest.raises(RefitError, match="was loaded in another way while the refit was under way"):
            engine.commit()
    engine.abort()
    refuses(llm, "was loaded in another way while the refit was under way")
    push(llm, policies[0], None)
    assert scores(llm) == expected[0]


def test_a_push_that_has_not_written_leaves_a_reload(llm: Any, policies: list[Tensors], expected: Any) -> None:
    """Weights that are reloaded between the beginning of a push and its first tensor serve; the push has to begin
    anew."""
    push(llm, policies[0], None)
    engine = as_engine(llm)
    engine.begin(manifest(llm, policies[1], None))
    reload(llm, policies[1])
    with pytest.raises(RefitError, match=r"loaded in another way.*keep serving"):
        engine.load(list(policies[1].items()))
    assert scores(llm) == expected[1]


def test_scales_of_a_failed_reload_are_forgotten(llm: Any, policies: list[Tensors], expected: Any) -> None:
    """Static activation scales that came with a failed reload do not stay with the weights that serve later."""
    scale = f"{EXPERT}.gate_proj.input_scale"
    with pytest.raises(Exception, match="holds NaN"):
        reload(llm, {scale: torch.tensor(0.5)} | nan_in_an_expert(policies[1]))
    reload(llm, policies[0])
    layer = llm.apply_model(lambda model: model.get_submodule("model.layers.1.mlp.experts"))[0]
    routed = next(m for m in layer.modules() if hasattr(m, "w13_input_scale"))
    assert not routed.w13_input_scale.any()
    assert scores(llm) == expected[0]


def test_half_sent_weights_leave_no_request(llm: Any, policies: list[Tensors], expected: Any) -> None:
    """A layer that refuses to be computed with, because half of a weight is missing, leaves no request behind."""
    name = f"{EXPERT}.gate_proj.weight"
    llm.apply_model(lambda model: model.load_weights([(name, policies[0][name])]))
    refuses(llm, "up_proj.weight: was not sent")
    with pytest.raises(RefitError, match="was not sent"):
        llm.generate([{"prompt_token_ids": [5, 9]}], SamplingParams(n=3, detokenize=False), use_tqdm=False)
    assert not llm.llm_engine.output_processor.parent_requests
    push(llm, policies[0], None)
    assert scores(llm) == expected[0]


def test_replaced_parameters_are_found(llm: Any, policies: list[Tensors], expected: Any) -> None:
    """A parameter that somebody has replaced by another one after the engine was started is what a failed push
    restores, and what a good one writes."""
    push(llm, policies[0], None)
    kept = []

    def replace(model: nn.Module) -> None:
        for module in model.modules():
            if "norm" in type(module).__name__.lower() and "weight" in module._parameters:
                kept.append(old := module.weight)
                new = nn.Parameter(old.data.clone(), requires_grad=False)
                new.__dict__.update(old.__dict__)
                module.weight = new

    llm.apply_model(replace)
    assert kept
    engine = as_engine(llm)
    tensors = {n: 1.5 * t if "norm" in n else t for n, t in policies[1].items()}  # which are all one
    engine.begin(manifest(llm, tensors, None))
    engine.load([(n, t) for n, t in tensors.items() if "norm" in n])
    engine.abort()
    assert scores(llm) == expected[0]
    push(llm, tensors, None)
    assert scores(llm) != expected[1]
    push(llm, policies[1], None)
    assert scores(llm) == expected[1]
