# SPDX-License-Identifier: Apache-2.0
"""Rollouts with the engine's own distributions: sample sequences once, then decode the same tokens in every arm.

    llm = LLM(model, **engine_options())
    once = sample(llm, prompts, max_tokens=64, temperature=1.0, seed=0)
    arm = force_decode(other_llm, once.prompt_token_ids, once.token_ids)

Both go through the engine's real path (prefill, then one token per step, continuous batching); forcing only replaces
the token that the sampler would have drawn, so all arms see the same contexts in the same batches and can be compared
in pairs. Log-probs are the model's own: natural log, at temperature 1, of the untouched logits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_quads.nvfp4.errors import QuadsError

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from vllm_quads.gap.processor import Recording

_serial = itertools.count()


@dataclass(frozen=True)
class Rollouts:
    """Generated sequences with the log-probs of the policy that decoded them; one list entry per sequence.

    Attributes:
        prompt_token_ids: the prompts.
        token_ids: the generated tokens, T per sequence (with the end-of-sequence token if it was generated).
        logprobs: (T,) float32, log-probs of these tokens as the engine reports them.
        distributions: (T, vocabulary) float32 log-softmax per generated position, or None if not asked for.
    """

    prompt_token_ids: list[list[int]]
    token_ids: list[list[int]]
    logprobs: list[torch.Tensor]
    distributions: list[torch.Tensor] | None


def engine_options() -> dict[str, Any]:
    """Arguments that `vllm.LLM` needs to capture: ``LLM(model, **engine_options())``.

    Also sets two environment variables that vLLM offers no argument for, unless they are set already:
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` (distributions are recorded in the process of the engine) and
    ``VLLM_USE_V2_MODEL_RUNNER=0`` (in vLLM 0.32 the second model runner, where it is the default, takes processors of
    another interface; 0.30 and older fall back to the first one by themselves). Prefix caching is off, so that every
    sequence runs its own prefill; chunked prefill is off because vLLM on CPU cannot chunk a request that has a seed
    (`sample`). It may be turned on again for `force_decode`.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    from vllm_quads.gap.processor import CaptureProcessor

    return {"logits_processors": [CaptureProcessor], "enable_prefix_caching": False, "enable_chunked_prefill": False}


def sample(
    llm: LLM,
    prompts_token_ids: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    distributions: bool = False,
) -> Rollouts:
    """Sample one continuation per prompt, sequence i with the seed ``seed + i``, up to the end token or `max_tokens`.

    Temperature 0 is greedy. The log-probs are those at temperature 1 whatever the temperature of the sampling.

    Raises:
        QuadsError: the engine was not built with `engine_options`.
    """
    from vllm import SamplingParams

    _check_engine(llm)
    if temperature > 0:
        _refuse_seeded_chunks(llm, prompts_token_ids)
    params = [
        SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens, logprobs=0, detokenize=False)
        for i in range(len(prompts_token_ids))
    ]
    return _generate(llm, prompts_token_ids, params, distributions)


def force_decode(
    llm: LLM,
    prompts_token_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    *,
    distributions: bool = True,
) -> Rollouts:
    """Decode exactly `token_ids` after the prompts, whatever the engine itself would choose (also past end tokens).

    Raises:
        QuadsError: a sequence is empty, too long for the engine or names a token outside of the vocabulary, or the
            engine was not built with `engine_options`.
    """
    from vllm import SamplingParams

    from vllm_quads.gap.processor import FORCED

    _check_engine(llm)
    if len(prompts_token_ids) != len(token_ids):
        raise QuadsError(f"{len(prompts_token_ids)} prompts but {len(token_ids)} token sequences: give one for each")
    config = llm.llm_engine.vllm_config.model_config
    vocabulary, limit = config.get_vocab_size(), config.max_model_len
    for i, (prompt, tokens) in enumerate(zip(prompts_token_ids, token_ids, strict=True)):
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise QuadsError(f"sequence {i}: token ids to decode must be at least one, each in 0..{vocabulary - 1}")
        if len(prompt) + len(tokens) > limit:
            raise QuadsError(
                f"sequence {i}: {len(prompt)} prompt + {len(tokens)} tokens exceed the engine's max_model_len={limit}; "
                "shorten it or start the engine with a larger max_model_len"
            )
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(tokens),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={FORCED: list(tokens)},
        )
        for tokens in token_ids
    ]
    rollouts = _generate(llm, prompts_token_ids, params, distributions)
    for i, (wanted, got) in enumerate(zip(token_ids, rollouts.token_ids, strict=True)):
        if list(wanted) != got:
            raise QuadsError(f"sequence {i}: the engine did not decode the given tokens; {_HOW_TO_BUILD}")
    return rollouts


_HOW_TO_BUILD = "build it with LLM(model, **vllm_quads.gap.capture.engine_options()) and run it in this process"


def _check_engine(llm: LLM) -> None:
    from vllm_quads.gap.processor import CaptureProcessor

    config = llm.llm_engine.vllm_config.model_config
    if CaptureProcessor not in (config.logits_processors or []):
        raise QuadsError(f"the engine has no capture processor: {_HOW_TO_BUILD}")
    if config.logprobs_mode != "raw_logprobs":
        raise QuadsError(f"logprobs_mode={config.logprobs_mode!r}: start the engine with logprobs_mode='raw_logprobs'")


def _refuse_seeded_chunks(llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
    """vLLM rewinds the generator of a seeded request after each prefill chunk, which dies on CPU and takes the engine
    along ("CPU Generator does not use offset"; 0.26 to 0.32). A step never schedules more than the longest prompts
    that fit into the batch at once, so below that no chunk can arise."""
    config = llm.llm_engine.vllm_config
    scheduler, device = config.scheduler_config, config.device_config.device
    longest = sorted(map(len, prompts), reverse=True)[: scheduler.max_num_seqs]
    chunks = scheduler.enable_chunked_prefill and sum(longest) > scheduler.max_num_batched_tokens
    if chunks and torch.device(device).type == "cpu":
        raise QuadsError(
            f"sampling with seeds on CPU: these prompts may be prefilled in chunks (up to {sum(longest)} tokens "
            f"at once, max_num_batched_tokens={scheduler.max_num_batched_tokens}), which vLLM cannot do for seeded "
            "requests; start the engine with enable_chunked_prefill=False (engine_options does)"
        )


def _generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: list[SamplingParams], distributions: bool
) -> Rollouts:
    """Run the requests (one SamplingParams each) and collect tokens, log-probs and, if asked for, distributions."""
    from vllm_quads.gap.processor import RECORD, RECORDINGS, Recording

    llm.reset_prefix_cache()  # no block of a previous run, perhaps of other weights, may serve as context

    keys = [f"{next(_serial)}" for _ in params] if distributions else []
    try:
        for key, request in zip(keys, params, strict=False):
            assert request.max_tokens is not None
            RECORDINGS[key] = Recording(request.max_tokens)
            request.extra_args = {**(request.extra_args or {}), RECORD: key}
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        recorded = [
            _distributions(RECORDINGS[key], len(c.token_ids)) for key, c in zip(keys, completions, strict=False)
        ]
    finally:
        for key in keys:
            RECORDINGS.pop(key, None)
    token_ids = [list(c.token_ids) for c in completions]
    return Rollouts(
        prompt_token_ids=[list(ids) for ids in prompts],
        token_ids=token_ids,
        logprobs=[
            torch.tensor([s[t].logprob for s, t in zip(c.logprobs or [], ids, strict=True)], dtype=torch.float32)
            for c, ids in zip(completions, token_ids, strict=True)
        ],
        distributions=recorded if distributions else None,
    )


def _distributions(recording: Recording, length: int) -> torch.Tensor:
    if recording.rows is None or recording.count < length:
        raise QuadsError(
            f"{recording.count} of {length} distributions were recorded: the engine runs in another process; "
            f"{_HOW_TO_BUILD} (VLLM_ENABLE_V1_MULTIPROCESSING=0, no tensor parallelism)"
        )
    return recording.rows[:length]
