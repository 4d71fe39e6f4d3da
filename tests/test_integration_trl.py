# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with a QUADS rollout: a real run on CPU, in which both sides hold the same policy at every step.

Its server mode is tested with the other tests of a server, in test_plugin_serve.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import stop_engine
from transformers import AutoModelForCausalLM, TrainerCallback

pytest.importorskip("trl", reason="trl is not installed")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trainer_qat import prepare_qat
from trainer_qat.integrations import trl as integration
from trainer_qat.integrations.trl import QuadsGRPOTrainer
from vllm_quads.nvfp4 import Contract, ContractError, MismatchError
from vllm_quads.refit import as_engine

ROOT = Path(__file__).parents[1]
STEPS = 5
PROMPTS = ["hello world", "abc", "the sky", "12345"]
ENGINE = {"enforce_eager": True, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 256}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Different characters in a completion."""
    return [float(len(set(c))) for c in completions]


def config(directory: Path, **options: Any) -> GRPOConfig:
    """Four samples a step, logged at each step, an update large enough to change the weights' codes."""
    defaults: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "max_completion_length": 8,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(output_dir=str(directory), **(defaults | options))


@pytest.fixture(scope="module")
def policy(make_tiny: Callable[..., Path]) -> Path:
    """The tiny Qwen3-MoE with a tokenizer of one token per character."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = make_tiny("qwen3_moe", seed=3)
    vocabulary = {chr(i) if 32 <= i < 127 else f"<{i}>": i for i in range(256)}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<255>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<0>", pad_token="<1>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def make_trainer(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """make_trainer(**options of the trainer) with its engine, which is stopped in the end."""
    made: list[Any] = []
    environment = dict(os.environ)  # a colocated engine is told of ranks by RANK, WORLD_SIZE, ...

    def make(model: Any = None, args: GRPOConfig | None = None, **options: Any) -> Any:
        args = config(tmp_path_factory.mktemp("out")) if args is None else args
        data = Dataset.from_dict({"prompt": PROMPTS * 4})
        made.append(
            QuadsGRPOTrainer(
                str(policy) if model is None else model,
                reward,
                args=args,
                train_dataset=data,
                **({"engine_options": ENGINE} | options),
            )
        )
        return made[-1]

    yield make
    while made:
        stop_engine(made.pop().vllm_generation.llm)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Fingerprints of both sides when a step has its gradients and its weights are still those of the rollout."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        self.trainer, self.engine = trainer, engine
        self.seen: list[tuple[str, str, int]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Called by Trainer before the optimizer steps."""
        mine = self.trainer.vllm_generation.sync.payload.fingerprint()
        engine = as_engine(self.engine)
        self.seen.append((mine, engine.fingerprint(), engine.policy_version()))


@pytest.fixture(scope="module")
def run(make_trainer: Callable[..., Any]) -> SimpleNamespace:
    """Five steps of GRPO."""
    trainer = make_trainer()
    watch = Watch(trainer, trainer.vllm_generation.llm)
    trainer.add_callback(watch)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return SimpleNamespace(trainer=trainer, seen=watch.seen, lines=lines)


def test_both_sides_hold_one_policy_at_every_step(run: SimpleNamespace) -> None:
    """Trainer and engine have one fingerprint at each of five steps, another one each time, and versions count on."""
    assert len(run.seen) == STEPS == len({mine for mine, _, _ in run.seen})
    assert all(mine == theirs for mine, theirs, _ in run.seen)
    assert [version for _, _, version in run.seen] == list(range(1, STEPS + 1))
    assert len(run.trainer.qat_report.quantized) == 2 * 4 * 3


def test_every_log_line_has_the_gap(run: SimpleNamespace) -> None:
    """Finite mismatch metrics at every step, in TRL's own log, equal to TRL's where it measures the same."""
    assert len(run.lines) == STEPS
    assert len({line["loss"] for line in run.lines}) == STEPS
    for step, line in enumerate(run.lines):
        ours = {k: v for k, v in line.items() if k.startswith("quads/")}
        assert {"quads/kl", "quads/k3_kl", "quads/eff_sample_size", "quads/push/seconds"} <= ours.keys()
        assert all(math.isfinite(v) for v in ours.values())
        assert ours["quads/policy_version"] == step + 1
        assert ours["quads/tokens"] == 4 * line["completions/mean_length"]
        assert 0 < ours["quads/sampling_logp_difference/mean"] < 0.5
        for key in ("mean", "max"):
            theirs = line[f"sampling/sampling_logp_difference/{key}"]
            assert ours[f"quads/sampling_logp_difference/{key}"] == pytest.approx(theirs, rel=1e-4)


def test_the_policy_is_saved_as_the_plain_model(run: SimpleNamespace, tmp_path: Path) -> None:
    """What the trainer saves loads without QUADS and holds the trained weights."""
    run.trainer.save_model(str(tmp_path / "saved"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="bfloat16")
    trained = run.trainer.model.state_dict()
    assert plain.state_dict().keys() == trained.keys()
    assert all(bool((tensor == trained[name]).all()) for name, tensor in plain.state_dict().items())
    assert "quads" not in (tmp_path / "saved" / "config.json").read_text()


def test_compensation_follows_the_policy(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """With refresh_compensation, channel sets are chosen by statistics and sensitivities of the rollouts."""
    trainer = make_trainer(args=config(tmp_path, max_steps=2), refresh_compensation=True)
    trainer.train()
    state = as_engine(trainer.vllm_generation.llm).compensation()  # type: ignore[attr-defined]
    assert state.sensitivities
    assert state.sensitivities.keys() == state.sites.keys()
    assert any(bool(site.blocks.any()) for site in state.sites.values())


def test_lora_beside_quantized_experts(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """TRL's `peft_config` on attention: the quantized experts stay, and the rollout has the merged adapters."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8, lora_alpha=64)
    trainer = make_trainer(args=config(tmp_path, max_steps=3), peft_config=adapters)
    watch = Watch(trainer, trainer.vllm_generation.llm)
    trainer.add_callback(watch)
    trainer.train()
    assert len({(mine, theirs) for mine, theirs, _ in watch.seen}) == 1
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert all(0 < line["quads/sampling_logp_difference/mean"] < 0.2 for line in lines)
    trainer.vllm_generation.sync_weights()
    served = dict(trainer.vllm_generation.llm.apply_model(lambda m: list(m.named_parameters()))[0])
    attention = trainer.model.base_model.model.model.layers[0].self_attn
    merged = attention.q_proj.base_layer.weight + attention.q_proj.get_delta_weight("default")
    rows = merged.shape[0]
    qkv = served["model.layers.0.self_attn.qkv_proj.weight"]
    mine = merged.detach().to(qkv.dtype)
    assert torch.equal(qkv[:rows] if qkv.shape[1] == mine.shape[1] else qkv.T[:rows], mine)
    assert not torch.equal(mine, attention.q_proj.base_layer.weight)


def test_a_server_of_raw_logprobs_is_refused() -> None:
    """vLLM's default log-probs are not those of the distribution that is sampled from: the remedy is named."""
    info = {"model_config": {"logprobs_mode": "raw_logprobs"}}
    client = SimpleNamespace(base_url="http://localhost:8000", get_server_info=lambda: info)
    with pytest.raises(ContractError, match="start it with --logprobs-mode processed_logprobs"):
        integration.require_sampled_logprobs(client)
    info["model_config"]["logprobs_mode"] = "processed_logprobs"
    integration.require_sampled_logprobs(client)


def test_a_prepared_model_keeps_its_contract(policy: Path, tmp_path: Path) -> None:
    """A model that was prepared by the user is taken as it is; another contract beside it is refused by name."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16")
    prepare_qat(model, Contract(keep_last_layers=1))
    assert integration._prepare(model, None, {}) is None
    with pytest.raises(ContractError, match="keep_last_layers: 1 != 0"):
        integration._prepare(model, Contract(), {})
    with pytest.raises(ContractError, match="prepared already.*cache"):
        integration._prepare(model, None, {"cache": "packed"})


def test_what_cannot_work_is_refused_at_construction(policy: Path, tmp_path: Path) -> None:
    """No vLLM, a colocated engine over several ranks, shards that hide weights, a model that came from no path."""
    data = Dataset.from_dict({"prompt": PROMPTS})

    def construct(model: Any = str(policy), **options: Any) -> None:
        args = config(tmp_path, **options)
        try:
            QuadsGRPOTrainer(model, reward, args=args, train_dataset=data)
        finally:
            assert args.use_vllm == options.get("use_vllm", True)

    with pytest.raises(ContractError, match="use_vllm: is off"):
        construct(use_vllm=False)
    with pytest.raises(ContractError, match="vllm_tensor_parallel_size: is 2, which does not divide"):
        construct(vllm_tensor_parallel_size=2)
    fsdp1 = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=fsdp1), is_fsdp_enabled=True)
    with pytest.raises(ContractError, match="fsdp_version: 2"):
        integration._check_sharding(trainer)
    nameless = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(policy).config)
    nameless.config._name_or_path = nameless.name_or_path = ""
    generation = SimpleNamespace(model=nameless, engine_options={})
    with pytest.raises(ContractError, match="engine_options"):
        integration._model_path(generation.model, generation.engine_options)


def test_ranks_with_different_policies_are_found(run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DDP each rank pushes its own copy: fingerprints that differ stop the run, naming them."""
    generation = run.trainer.vllm_generation
    generation._require_one_policy()
    monkeypatch.setattr(integration, "gather_object", lambda mine: [*mine, "0" * 16, None])
    with pytest.raises(
        MismatchError, match=f"0000.*{generation.report.fingerprint}|{generation.report.fingerprint}.*0000"
    ):
        generation._require_one_policy()


def test_the_mixin_goes_in_front_of_other_grpo_trainers() -> None:
    """The mixin comes first, so that its `compute_loss` and `log` see what a subclass of GRPOTrainer does."""

    class Mine(GRPOTrainer):  # type: ignore[misc]
        pass

    class Trainer(integration.QuadsMixin, Mine):
        pass

    assert Trainer.log is integration.QuadsMixin.log
    assert Trainer.__mro__.index(integration.QuadsMixin) < Trainer.__mro__.index(Mine)


def test_the_example_runs(run: SimpleNamespace, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/trl_grpo.py, with QUADS and with --naive, on the tiny model instead of SmolLM2-MoE."""
    spec = importlib.util.spec_from_file_location("trl_grpo", ROOT / "examples" / "trl_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made: list[Any] = []
    for arm in ([], ["--naive"]):
        arguments = ["--model", str(policy), "--steps", "1", "--prompts", "1", "--tokens", "4", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["trl_grpo.py", *arguments, *arm])
        monkeypatch.setattr(example, "GRPOTrainer", lambda *a, **k: made.append(QuadsGRPOTrainer(*a, **k)) or made[-1])
        assert example.main() == 0
        stop_engine(made.pop().vllm_generation.llm)
        (line,) = json.loads((tmp_path / "metrics.json").read_text())
        assert line["quads/policy_version"] == 1
        assert line["quads/sampling_logp_difference/mean"] > 0
