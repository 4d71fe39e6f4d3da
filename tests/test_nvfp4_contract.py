# SPDX-License-Identifier: Apache-2.0
"""The contract: parse, validate, serialise, compare, and resolve the set of quantized tensors."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_quads.nvfp4 import (
    Activation,
    ActivationGlobalScale,
    Allocation,
    BlockScaleRule,
    Centering,
    Compensation,
    Contract,
    ContractError,
    Form,
    MismatchError,
    QuantizedSet,
    Scheme,
    WeightGlobalScale,
    first_difference,
)

ALL = "model.layers.*_proj"


def _moe(layers: int = 2, experts: int = 2, k: int = 32) -> dict[str, tuple[int, int]]:
    """Shapes of a DeepSeek-like model: routed and shared experts, attention, router, embedding, head."""
    weights: dict[str, tuple[int, int]] = {"model.embed_tokens": (64, k), "lm_head": (64, k)}
    for i in range(layers):
        p = f"model.layers.{i}."
        weights |= {f"{p}self_attn.{n}_proj": (k, k) for n in "qkvo"}
        weights[f"{p}mlp.gate"] = (experts, k)
        for mlp in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            weights |= {f"{p}mlp.{mlp}.gate_proj": (48, k), f"{p}mlp.{mlp}.up_proj": (48, k)}
            weights[f"{p}mlp.{mlp}.down_proj"] = (k, 48)
    return weights


contracts = st.builds(
    Contract,
    scheme=st.sampled_from(Scheme),
    targets=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3).map(tuple),
    ignore=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    keep_first_layers=st.integers(0, 100),
    keep_last_layers=st.integers(0, 100),
    weight_global_scale=st.sampled_from(WeightGlobalScale),
    activation=st.builds(
        Activation,
        global_scale=st.sampled_from(ActivationGlobalScale),
        block_scale_rule=st.sampled_from(BlockScaleRule),
        centering=st.sampled_from(Centering),
    ),
    compensation=st.builds(
        Compensation, form=st.sampled_from(Form), ratio=st.floats(0, 1), allocation=st.sampled_from(Allocation)
    ),
)


@given(contracts)
def test_json_round_trip(contract: Contract) -> None:
    """Through config.json and back every contract is equal, has the same digest, and no difference."""
    back = Contract.from_dict(json.loads(json.dumps(contract.to_dict())))
    assert back == contract
    assert back.digest() == contract.digest()
    assert first_difference(back, contract) is None


@given(contracts, contracts)
def test_difference_and_digest_follow_equality(a: Contract, b: Contract) -> None:
    """Contracts have a first difference exactly when they are not equal, and so do their digests."""
    assert (first_difference(a, b) is None) == (a == b) == (a.digest() == b.digest())


def test_empty_options_give_the_defaults() -> None:
    """No option is needed."""
    assert Contract.from_dict({}) == Contract()
    assert Contract.from_dict({"quant_method": "quads", "version": 1}) == Contract()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": 2}, "version: this contract has version 2, this release reads version 1"),
        ({"quant_method": "awq"}, "quant_method: is 'awq', expected 'quads'"),
        ({"shceme": "w4a4"}, "shceme: unknown option; expected one of .*'scheme'"),
        ({"scheme": "w8a8"}, r"scheme: is 'w8a8', expected one of \['w4a4', 'w4a16'\]"),
        ({"compensation": {"ratio": 1.5}}, "compensation.ratio: is 1.5, expected 0 to 1"),
        ({"compensation": {"ratio": float("nan")}}, "compensation.ratio"),
        ({"compensation": {"ratio": "half"}}, "compensation.ratio: is 'half', expected a number"),
        ({"compensation": {"ratio": True}}, "compensation.ratio"),
        ({"compensation": {"rato": 0.5}}, "compensation.rato: unknown option"),
        ({"compensation": 0.5}, "compensation.?: is 0.5, expected an object"),
        ({"activation": {"centering": "mode"}}, "activation.centering: is 'mode'"),
        ({"targets": []}, "targets: is empty"),
        ({"targets": "*.experts.*"}, "targets: is .* expected a list of patterns"),
        ({"targets": 5}, "targets: is 5, expected a list of patterns"),
        ({"ignore": None}, "ignore: is None, expected a list of patterns"),
        ({"ignore": [1]}, "ignore: .* expected a list of patterns"),
        ({"keep_first_layers": -1}, "keep_first_layers: is -1, expected 0 or more"),
        ({"keep_last_layers": 1.5}, "keep_last_layers: is 1.5, expected an integer"),
    ],
)
def test_bad_contract_is_one_clear_error(data: dict[str, Any], message: str) -> None:
    """Unknown version, method, option or value: the message names the option by its dotted path."""
    with pytest.raises(ContractError, match=message):
        Contract.from_dict(data)


def test_merged_replaces_nested_options_only() -> None:
    """Options from the command line change what they name and keep the rest; typos are refused."""
    base = Contract(ignore=("*.q_proj",))
    merged = base.merged({"compensation": {"ratio": 0.5}, "scheme": "w4a16"})
    assert merged.compensation == Compensation(ratio=0.5)
    assert (merged.ignore, merged.scheme) == (base.ignore, Scheme.W4A16)
    assert first_difference(base, merged) == "compensation.ratio: 0.25 != 0.5"
    with pytest.raises(ContractError, match="compensation.ration"):
        base.merged({"compensation": {"ration": 0.5}})


def test_default_targets_are_the_routed_experts() -> None:
    """By default every routed expert matrix is quantized, and nothing else: not the shared experts, not attention."""
    weights = _moe()
    resolved = Contract().resolve(weights)
    assert list(resolved.shapes) == sorted(n for n in weights if ".experts." in n)
    assert len(resolved) == 12
    assert "model.layers.0.mlp.gate" not in resolved


@pytest.mark.parametrize("pattern", ["*gate_proj*", "*.gate_proj", "*gate_*", "*.mlp.*gate_proj"])
def test_a_gate_proj_pattern_never_catches_the_router(pattern: str) -> None:
    """The router `mlp.gate` is not matched by patterns for gate_proj."""
    assert not Contract(targets=(pattern,)).selects("model.layers.0.mlp.gate")
    resolved = Contract(targets=(pattern, "*.up_proj")).resolve(_moe())
    assert not any(n.endswith(".gate") for n in resolved.shapes)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.mlp.*", "model.layers.0.mlp.gate: QUADS does not quantize a router"),
        ("lm_head", "lm_head: QUADS does not quantize an lm_head"),
        ("*embed*", "model.embed_tokens: QUADS does not quantize an embedding"),
    ],
)
def test_router_head_and_embedding_are_refused_with_the_reason(pattern: str, message: str) -> None:
    """Asked to quantize them, QUADS says which tensor, why not, and what to change."""
    with pytest.raises(ContractError, match=message + r" \(.*\); narrow `targets` or add it to `ignore`"):
        Contract(targets=("*.experts.*", pattern)).resolve(_moe())


def test_ignore_that_matches_nothing_warns() -> None:
    """A typo in `ignore` would quantize a layer that should stay: it is reported with an example of a name."""
    with pytest.warns(
        UserWarning, match=r"ignore: pattern '\*.q_prj' matches no weight .*model.layers.0.self_attn.q_proj"
    ):
        Contract(ignore=("*.q_prj",)).resolve(_moe())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Contract(ignore=("*.layers.0.*",)).resolve(_moe())


def test_contract_that_names_no_tensor() -> None:
    """Targets that match nothing are an error; on a model without experts it says what to name."""
    with pytest.raises(
        ContractError, match=r"targets: \['\*.nope'\] select no weight .*model.layers.0.self_attn.q_proj"
    ):
        Contract(targets=("*.nope",)).resolve(_moe())
    dense = {n: s for n, s in _moe().items() if ".experts." not in n}
    with pytest.raises(ContractError, match="no routed experts: name its linears"):
        Contract().resolve(dense)
    assert len(Contract(targets=("*_proj",)).resolve(dense)) == 14


def test_half_of_a_fused_group_is_refused() -> None:
    """gate without up, or q without k and v, cannot be multiplied as one matrix: the missing sibling is named."""
    with pytest.raises(ContractError, match=r"experts.0.gate_proj is quantized but .*experts.0.up_proj is not"):
        Contract(ignore=("*.up_proj",)).resolve(_moe())
    with pytest.raises(ContractError, match="q_proj is quantized but model.layers.0.self_attn.k_proj is not"):
        Contract(targets=("*.q_proj",)).resolve(_moe())


def test_k_that_is_not_a_multiple_of_16_is_refused_by_name() -> None:
    """Before any weight is read."""
    with pytest.raises(ContractError, match=r"model.layers.0.mlp.experts.0.gate_proj: K = 40 is not a multiple of 16"):
        Contract().resolve(_moe(k=40))


def test_layers_count_from_the_config_and_not_from_names() -> None:
    """`keep_last_layers` keeps the same layers whether or not a multi-token-prediction layer follows them, and one
    pipeline stage selects what the whole model selects; MTP layers stay in BF16."""
    contract = Contract(keep_last_layers=1)
    whole = contract.resolve(_moe(layers=3))
    assert contract.resolve(_moe(layers=4), num_layers=3).shapes == whole.shapes  # layer 3 is MTP
    assert Contract().resolve(_moe(layers=4), num_layers=3).shapes == Contract().resolve(_moe(layers=3)).shapes
    stage = {n: s for n, s in _moe(layers=2).items() if ".layers." in n}
    assert contract.resolve(stage, num_layers=3).shapes == whole.shapes
    assert contract.resolve(stage).shapes != whole.shapes


def test_latent_attention() -> None:
    """q_a and kv_a are one matrix in vLLM and selected together; kv_b, which vLLM absorbs, is refused with a reason."""
    base = "model.layers.0.self_attn"
    weights = {f"{base}.{p}": (64, 64) for p in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")}
    with pytest.raises(ContractError, match=r"kv_b_proj: QUADS does not quantize it: vLLM absorbs it .*to `ignore`"):
        Contract(targets=("*.self_attn.*",)).resolve(weights)
    with pytest.raises(ContractError, match="q_a_proj is quantized but .*kv_a_proj_with_mqa is not"):
        Contract(targets=("*.q_a_proj",)).resolve(weights)
    assert len(Contract(targets=("*.self_attn.*",), ignore=("*.kv_b_proj",)).resolve(weights)) == 4


def test_first_and_last_layers_are_kept() -> None:
    """keep_first_layers and keep_last_layers count decoder layers; keeping all of them is an error."""
    resolved = Contract(keep_first_layers=1, keep_last_layers=2).resolve(_moe(layers=5))
    assert {n.split(".")[2] for n in resolved.shapes} == {"1", "2"}
    with pytest.raises(ContractError, match="select no weight"):
        Contract(keep_first_layers=3, keep_last_layers=2).resolve(_moe(layers=5))


def test_selection_does_not_depend_on_the_spelling() -> None:
    """Mixtral's, vLLM's and a wrapped trainer's names of one weight are selected alike."""
    contract = Contract(ignore=("*.layers.1.mlp.experts.0.*",))
    for i, selected in ((0, True), (1, False)):
        for name in ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1.weight"):
            assert contract.selects(f"_fsdp_wrapped_module.model.layers.{i}.{name}") is selected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "a is quantized by the rollout but not by the trainer"),
        ({"b": (32, 16)}, r"b has shape \(32, 16\) in the trainer and \(16, 16\) in the rollout"),
        ({"aa": (1, 16)}, "aa is quantized by the trainer but not by the rollout"),
    ],
)
def test_sets_that_differ_name_the_first_difference(change: dict[str, Any], message: str) -> None:
    """Trainer and rollout that quantize different tensors stop with the first one by name."""
    rollout = QuantizedSet({"a": (16, 16), "b": (16, 16)})
    rollout.require_equal(QuantizedSet(dict(rollout.shapes)))
    trainer = QuantizedSet({n: s for n, s in {**rollout.shapes, **change}.items() if s})
    with pytest.raises(MismatchError, match=message):
        trainer.require_equal(rollout)
