# SPDX-License-Identifier: Apache-2.0
"""Refits of an `AsyncLLM` whose two workers share the model (tensor parallel attention, expert parallel MoE)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import PROMPTS
from serving_helpers import Background, log_probs, manifest, train, trainer
from torch import nn

pytest.importorskip("vllm")

from trainer_qat import RolloutSync
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.serving import AsyncEngine
from vllm_quads.refit import as_engine

LONG = 80
"""Tokens of a request that is surely still running when a refit begins."""


@pytest.fixture(scope="module")
def background(tiny_qwen3_moe: Path) -> Iterator[Background]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        running = Background(tiny_qwen3_moe, tensor_parallel_size=2, enable_expert_parallel=True)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def model(tiny_qwen3_moe: Path) -> nn.Module:
    return trainer(tiny_qwen3_moe)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def _rest_of_a_push(rollout: Any, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    rollout.load(stream)
    rollout.commit()


@pytest.mark.slow
def test_two_ranks_hold_the_trainers_weights(background: Background, model: nn.Module) -> None:
    """Packed and BF16 pushes give both ranks together the trainer's fingerprint, and the first weights pushed again
    give the log-probs of the engine's own load, bit for bit. Outputs name the policy version that made them."""
    sync = RolloutSync(model, background.llm)
    rollout = as_engine(background.llm)
    fresh, first = background.scores(PROMPTS), weights(model)
    assert rollout.fingerprint() == sync.payload.fingerprint()
    train(model, 1)
    report = sync.push()
    changed = background.scores(PROMPTS)
    assert changed != fresh
    assert report.fingerprint == sync.payload.fingerprint() == rollout.fingerprint()
    assert sync.push(packed=False).fingerprint == report.fingerprint
    assert background.scores(PROMPTS) == changed
    model.load_state_dict(first)
    report = sync.push()
    assert background.scores(PROMPTS) == fresh
    completion = background.run(background.generate(PROMPTS[0]))
    if hasattr(completion, "weight_versions"):  # vLLM 0.32
        (span,) = completion.weight_versions
        assert (span.version, span.start, span.end) == (str(report.policy_version), 0, 6)


@pytest.mark.slow
def test_damage_on_the_way_is_refused_by_both_ranks(background: Background, model: nn.Module) -> None:
    """A NaN that only one rank's shard holds, a tensor that never comes, and a version that is not newer: the previous
    weights serve on both ranks, which still answer in step, and the next push succeeds."""
    sync = RolloutSync(model, background.llm)
    rollout: Any = as_engine(background.llm)
    sync.push()
    before, version, fingerprint = background.scores(PROMPTS), rollout.policy_version(), rollout.fingerprint()
    announced = manifest(sync, rollout)
    tensors = [pair for item in sync.payload.items() for pair in item.tensors().items()]

    def damaged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name.endswith("layers.1.self_attn.o_proj.weight"):
                tensor = tensor.clone()
                tensor[0, -1] = torch.nan
            yield name, tensor

    for stream, said in ((damaged(), r"layers\.1\.self_attn\.o_proj"), (iter(tensors[:-3]), "never sent")):
        rollout.begin(announced)
        with pytest.raises(RefitError, match=rf"{said}.*previous weights keep serving"):
            _rest_of_a_push(rollout, stream)
        assert (rollout.policy_version(), rollout.fingerprint()) == (version, fingerprint)
        assert background.scores(PROMPTS) == before
    with pytest.raises(RefitError, match=rf"policy version {version} is not newer than {version}"):
        sync.push(version)
    assert background.scores(PROMPTS) == before
    assert sync.push().policy_version == version + 1


@pytest.mark.slow
def test_a_dead_trainer_can_be_replaced(background: Background, model: nn.Module) -> None:
    """A trainer that dies half-way leaves the engine paused; another one is told so, recovers it, and the previous
    weights serve."""
    sync = RolloutSync(model, background.llm)
    sync.push()
    before = background.scores(PROMPTS)
    train(model, 2)
    dead = AsyncEngine(background.llm)
    dead.begin(manifest(sync, dead))
    dead.load(pair for item in list(sync.payload.items())[:20] for pair in item.tensors().items())
    waiting = background.submit(background.generate(PROMPTS[0]))
    rollout: Any = as_engine(background.llm)
    with pytest.raises(RefitError, match=r"another trainer's update is open.*recover\(\)"):
        sync.push()
    time.sleep(0.05)
    assert not waiting.done()
    rollout.recover()
    assert log_probs(waiting.result(60)) == before[:6]
    assert background.scores(PROMPTS) == before
    sync.push()
    assert background.scores(PROMPTS) != before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_in_flight(mode: str, background: Background, model: nn.Module) -> None:
    """`wait`: running requests end with the old weights, later ones have the new ones. `keep`: running requests go on
    with the new ones. `abort`: running requests end early. In no case does one forward pass mix two policies: every
    token's log-prob is exactly that of one of them."""
    sync = RolloutSync(model, background.llm)
    sync.engine = AsyncEngine(background.llm, in_flight=mode)
    sync.push()
    prompt = [7, 8, 9, 3]  # one request at a time: a CPU's matrix products may depend on the batch in their last bits
    old = log_probs(background.run(background.generate(prompt, LONG)))
    train(model, 3)
    running = background.submit(background.generate(prompt, LONG))
    time.sleep(0.1)
    sync.push()
    completion = running.result(60)
    later, new = (log_probs(background.run(background.generate(prompt, LONG))) for _ in range(2))
    assert later == new != old
    values = log_probs(completion)
    switched = next((i for i, (a, b) in enumerate(zip(values, old, strict=False)) if a != b), None)
    if mode == "wait":
        assert values == old
    elif mode == "abort":
        assert completion.finish_reason == "abort"
        assert len(values) < LONG
        assert switched is None
    else:
        assert switched is not None
        assert len(values) == LONG
        # The next token is what the new policy says after the tokens so far, all of them computed anew.
        background.run(background.llm.reset_prefix_cache())  # blocks of decoded tokens are not those of a prefill
        rest = background.run(background.generate(prompt + list(completion.token_ids)[:switched], 1))
        assert log_probs(rest) == values[switched : switched + 1]


@pytest.mark.slow
def test_asleep_at_level_2_requests_wait_for_a_push(background: Background, model: nn.Module) -> None:
    """After `wake_up` a request still waits, and the next push answers it. (On a CPU the weights are not gone.)"""
    sync = RolloutSync(model, background.llm)
    sync.push()
    before, rollout = background.scores(PROMPTS), sync.engine
    assert isinstance(rollout, AsyncEngine)
    rollout.sleep(2)
    rollout.wake_up()
    assert rollout.status().state.value == "refusing"
    waiting = background.submit(background.generate(PROMPTS[0]))
    time.sleep(0.05)
    assert not waiting.done()
    sync.push()
    assert log_probs(waiting.result(60)) == before[:6]
    assert background.scores(PROMPTS) == before


@pytest.mark.slow
def test_a_push_from_the_engines_own_loop_is_refused(background: Background, model: nn.Module) -> None:
    """It would wait for itself; the error says how to do it."""
    sync = RolloutSync(model, background.llm)

    async def wrong() -> None:
        sync.push()

    with pytest.raises(RefitError, match=r"await asyncio.to_thread\(sync\.push\)"):
        background.run(wrong())
