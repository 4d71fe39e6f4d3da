# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and odd models: one error that names the argument, and a model that is as it was."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from fake_engine import FakeEngine
from safetensors.torch import load_file, save_file
from torch import nn
from trainer_models import mixtral, qwen3, single_thread, tokens  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_qat import (
    RolloutSync,
    Schedule,
    calibrate,
    export_checkpoint,
    follow_optimizer,
    load_qat_state_dict,
    mismatch,
    prepare_qat,
    probe_layers,
    qat_state_dict,
    qat_step,
    sensitivities,
    token_log_probs,
)
from trainer_qat.integrations.gap import GapRecorder
from trainer_qat.prepare import FROZEN_FILE, is_prepared, quantizers_of
from vllm_quads.nvfp4 import Contract, ContractError, FormatError, QuadsError, WeightGlobalScale

FROZEN = Contract(weight_global_scale=WeightGlobalScale.FROZEN)
DENSE = ("*.mlp.*_proj", "*.self_attn.*_proj")


def llama(tied: bool) -> LlamaForCausalLM:
    """A dense model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


class Wrapped(nn.Module):
    """What DistributedDataParallel looks like."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "disk"}, r"cache: is 'disk', expected one of \['auto', 'none', 'dense', 'packed'\]"),
        ({"contract": {"scheme": "w4a4"}}, "contract: is dict, expected .*Contract.from_dict"),
        ({"contract": "w4a4"}, "contract: is str"),
        ({"clamp_gradient": "false"}, "clamp_gradient: is 'false', expected True or False"),
        ({"w4a4_ablation": 1}, "w4a4_ablation: is 1, expected True or False"),
    ],
)
def test_wrong_arguments_of_prepare(arguments: dict[str, object], message: str) -> None:
    """They are named, and nothing is hooked."""
    model = qwen3()
    with pytest.raises(ContractError, match=message):
        prepare_qat(model, **arguments)
    assert not list(quantizers_of(model))
    with pytest.raises(ContractError, match="model: is NoneType"):
        prepare_qat(None)


def test_a_contract_that_is_a_dictionary(tmp_path: Path) -> None:
    """As a config file gives it: every entry says what to make of it."""
    model = qwen3()
    for batches in (tokens(), [[1, 2]]):
        with pytest.raises(QuadsError, match=r"calibrate: batches hold a batch .*, expected a list of int64 \[B, T\]"):
            calibrate(model, batches, Contract())
    for action in (
        lambda: export_checkpoint(model, tmp_path / "x", {}),
        lambda: RolloutSync(model, None, contract={}),
        lambda: probe_layers(model, tokens(), contract={}),
        lambda: calibrate(model, [tokens()], {}),
        lambda: sensitivities(model, [[1]], [[2]], contract={}),
    ):
        with pytest.raises(ContractError, match="contract: is dict, expected .*Contract.from_dict"):
            action()


def test_masters_without_their_scales() -> None:
    """FP8 weights are floating point, but not the model's weights: refused by name."""
    model = qwen3()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ContractError, match="layers.1.mlp.experts.down_proj: is torch.float8_e4m3fn; QUADS trains"):
        prepare_qat(model)


def test_wrong_state_and_optimizer() -> None:
    """What does not continue a run is named before anything changes."""
    model = qwen3()
    prepare_qat(model, FROZEN)
    state = qat_state_dict(model)
    name = next(key for key in state if key.startswith("amax."))
    for bad, message in (
        (None, "expected the tensors by name"),
        (state | {"step": 3}, "expected the tensors by name"),
        (state | {"step": torch.tensor(-3)}, "step is not finite and at least 0"),
        (state | {name: state[name] * torch.nan}, f"{name} is not finite"),
    ):
        with pytest.raises(ContractError, match=message):
            load_qat_state_dict(model, bad)
    with pytest.raises(ContractError, match="optimizer: is NoneType, expected a torch optimizer"):
        follow_optimizer(model, None)


def test_a_module_replaced_after_preparation() -> None:
    """It multiplies with its plain weight, so a push of it quantized would be another policy."""
    model = qwen3()
    prepare_qat(model, Contract(targets=DENSE))
    model.model.layers[1].self_attn.o_proj = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match="layers.1.self_attn.o_proj: the contract quantizes it, but the module"):
        RolloutSync(model, None)


def test_steps_counted_by_two() -> None:
    """follow_optimizer and a callback would run a schedule at twice its speed: a warning, once, and only then."""
    model, quiet = qwen3(), qwen3()
    for m in (model, quiet):
        prepare_qat(m, schedule=Schedule(ramp=9))
    optimizer = torch.optim.SGD(model.parameters())
    follow_optimizer(model, optimizer)
    follow_optimizer(quiet, optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
            qat_step(model)
    with pytest.warns(UserWarning, match="follows an optimizer already, so steps are going to count twice"):
        follow_optimizer(model, torch.optim.SGD(model.parameters()))
    assert [str(w.message).partition(" in between")[0] for w in seen if "qat_step" in str(w.message)] == [
        "qat_step(model) was called twice without an optimizer step"
    ]


def test_failed_preparation_leaves_the_model_alone(tmp_path: Path) -> None:
    """An error at the last weight leaves no weight hooked: a half-prepared model would train against half a rollout."""
    contract = Contract(targets=DENSE, weight_global_scale=WeightGlobalScale.FROZEN)
    model = llama(False)
    before = {name: type(m) for name, m in model.named_modules()}
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(FormatError, match="layers.1.mlp.down_proj: holds NaN"):
        prepare_qat(model, contract)
    assert not list(quantizers_of(model))
    assert not is_prepared(model)
    assert {name: type(m) for name, m in model.named_modules()} == before
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = 0.0
    prepare_qat(model, contract)


def test_damaged_frozen_scales(tmp_path: Path) -> None:
    """`frozen_from` with a NaN, a missing expert or a file of junk: named, and the model stays plain."""
    first = mixtral()
    prepare_qat(first, FROZEN)
    export_checkpoint(first, tmp_path / "x")
    file = tmp_path / "x" / FROZEN_FILE
    good = load_file(file)
    last = sorted(good)[-1]
    model = mixtral()
    for bad, message in (
        (good[last] * torch.nan, "is not float32, finite and at least 0"),
        (good[last][:2].clone(), r"has shape \(2,\), expected \(4,\)"),
    ):
        save_file({**good, last: bad}, file)
        with pytest.raises(ContractError, match=f"{last}: .*{message}"):
            prepare_qat(model, FROZEN, frozen_from=tmp_path / "x")
        assert not list(quantizers_of(model))
    file.write_bytes(b"junk")
    with pytest.raises(ContractError, match="frozen_amax.safetensors cannot be read"):
        prepare_qat(model, FROZEN, frozen_from=tmp_path / "x")


@pytest.mark.parametrize("tied", [True, False])
def test_tying_that_the_config_denies(tied: bool, tmp_path: Path) -> None:
    """An engine goes by the config: it would serve another lm_head than the trainer's, or none."""
    model = llama(not tied)
    table = model.model.embed_tokens.weight
    model.lm_head.weight = table if tied else nn.Parameter(table.detach() * 2)
    prepare_qat(model, Contract(targets=DENSE))
    with pytest.raises(ContractError, match=f"set model.config.tie_word_embeddings = {tied}"):
        export_checkpoint(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    model.config.tie_word_embeddings = tied
    export_checkpoint(model, tmp_path / "x")


def test_wrappers_within_wrappers(tmp_path: Path) -> None:
    """torch.compile inside of DistributedDataParallel, in either order: still the prepared model."""
    model = qwen3()
    prepare_qat(model)
    want = export_checkpoint(model, tmp_path / "plain").fingerprint
    for i, wrapped in enumerate(
        (Wrapped(Wrapped(model)), Wrapped(torch.compile(model)), torch.compile(Wrapped(model)))
    ):
        assert export_checkpoint(wrapped, tmp_path / str(i)).fingerprint == want


def test_tokenizer_that_is_none(tmp_path: Path) -> None:
    """Something that cannot be saved is refused before anything is written."""
    with pytest.raises(ContractError, match="tokenizer: is int"):
        export_checkpoint(qwen3(), tmp_path / "x", Contract(), tokenizer=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sensitivities": {"a.w13": float("nan")}}, r"sensitivities\['a.w13'\]: is nan"),
        ({"sensitivities": {"a.w13": float("inf")}}, "is inf, expected a finite number"),
        ({"sensitivities": {"a.w13": -1.0}}, "is -1.0, expected a finite number of at least 0"),
        ({"sensitivities": {"a.w13": "high"}}, "is 'high'"),
        ({"sensitivities": {5: 1.0}}, r"sensitivities\[5\]"),
        ({"sensitivities": [1.0]}, "sensitivities: is list"),
        ({"policy_version": -1}, "policy_version: is -1"),
        ({"policy_version": "latest"}, "policy_version: is 'latest'"),
        ({"policy_version": True}, "policy_version: is True"),
    ],
)
def test_wrong_arguments_of_push(arguments: dict[str, object], message: str) -> None:
    """Refused by name before the engine hears of the push."""
    model = qwen3()
    report = prepare_qat(model)
    engine = FakeEngine(Contract(), report.quantized)
    sync = RolloutSync(model, engine)
    with pytest.raises(ContractError, match=message):
        sync.push(**arguments)
    assert engine.calls == []
    assert sync.push(policy_version=7, sensitivities={"a.w13": 0}).policy_version == 7


def test_mismatch_of_what_is_no_log_prob() -> None:
    """Probabilities and negative log-likelihoods are refused; a batch without tokens counts zero."""
    zeros = torch.zeros(2, 3)
    with pytest.raises(QuadsError, match=r"trainer holds 0.5, expected log-probs"):
        mismatch.measure(zeros + 0.5, zeros)
    with pytest.raises(QuadsError, match=r"rollout holds 3, expected log-probs"):
        mismatch.measure(zeros, zeros + 3)
    with pytest.raises(QuadsError, match="trainer is list, expected a tensor"):
        mismatch.measure([0.0], [0.0])
    for shape in ((0,), (2, 0), (0, 3)):
        assert mismatch.measure(torch.zeros(shape), torch.zeros(shape)).tokens == 0
    for mask in (torch.tensor([[1, -100, 0]] * 2), torch.full((2, 3), 0.5)):
        with pytest.raises(QuadsError, match=r"mask holds (-100|0.5), expected 0 or 1"):
            mismatch.measure(zeros, zeros, mask)
        with pytest.raises(QuadsError, match="mask holds"):
            GapRecorder().add(zeros, zeros, mask)
    logits, ids = torch.zeros(1, 3, 8), torch.tensor([[1, 2, -100]])
    with pytest.raises(QuadsError, match="token ids are -100 to 2, expected 0 to 7; take the input ids"):
        mismatch.selective_log_softmax(logits, ids)
    for bad in ("1", torch.ones(3), 0.0):
        with pytest.raises(QuadsError, match="expected one positive number"):
            mismatch.selective_log_softmax(logits, ids.clamp(min=0), bad)
    with pytest.raises(QuadsError, match="upper='2'; expected numbers"):
        mismatch.importance_weights(zeros, zeros, upper="2")
    with pytest.raises(QuadsError, match=r"distributions for \[3\] tokens, but \[2\] tokens"):
        token_log_probs([torch.zeros(3, 8)], [[1, 2]])
    hidden = torch.tensor([[1.0, -1.0]])
    assert mismatch.measure(hidden, hidden, torch.tensor([[0, 1]])).tokens == 1  # what the mask hides may be anything


def test_a_weight_that_diverges_in_training_stops_the_forward_pass() -> None:
    """Inf in a master weight is an error with its name, not a policy of NaNs."""
    model = qwen3()
    prepare_qat(model)
    model.model.layers[1].mlp.experts.down_proj.data[0, 0, 0] = float("inf")
    with pytest.raises(FormatError, match="layers.1.mlp.experts.down_proj: holds NaN or Inf"):
        model(tokens())
