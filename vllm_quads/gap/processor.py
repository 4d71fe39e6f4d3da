# SPDX-License-Identifier: Apache-2.0
"""A vLLM logits processor that records the policy's distributions and can dictate the next token.

Importing this module imports vLLM; `vllm_quads.gap.capture` is the way in. The processor uses vLLM's public V1
interface (`vllm.v1.sample.logits_processor`), which is the same from 0.26 to 0.33. What it relies on:

* The V1 sampler takes ``raw_logprobs`` from the logits *before* processors run, so the log-prob that the engine
  returns for a dictated token is the model's own. It then hands processors a float32 copy. Built-in processors come
  first, but each leaves rows alone that do not ask for it (min_tokens, logit_bias, bad words, penalties).
* ``is_argmax_invariant() == False`` makes the processor run for greedy requests too.
* Row i of the logits is request i of the persistent batch. `BatchUpdate` says how requests enter, leave and move.
* The list of output tokens handed over with a new request grows in place; its length is the position that the current
  row decides. Counting steps instead would be wrong: the rows of unfinished prefill chunks pass through here as well
  (their token is thrown away, and the recording is overwritten by the last chunk), and a preempted request comes back.
  Under asynchronous scheduling the list holds placeholders for tokens in flight, so only its length is used.

Requests opt in by ``SamplingParams.extra_args``: `FORCED` (list of token ids) and `RECORD` (key of a `Recording`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORCED = "quads_forced_tokens"
RECORD = "quads_record"


@dataclass
class Recording:
    """Log-softmax rows (float32, CPU) of one request; row t is the distribution that decided output token t."""

    max_tokens: int
    rows: torch.Tensor | None = None  # (max_tokens, vocabulary), filled up to `count`
    count: int = 0

    def write(self, position: int, row: torch.Tensor) -> None:
        if position >= self.max_tokens:  # asynchronous scheduling may run one step past the end
            return
        if self.rows is None:
            self.rows = torch.empty(self.max_tokens, row.numel(), dtype=torch.float32)
        self.rows[position] = row
        self.count = max(self.count, position + 1)


# Recordings under way in this process; `vllm_quads.gap.capture` adds an entry per request and takes it out again.
RECORDINGS: dict[str, Recording] = {}


@dataclass
class _Row:
    output_ids: list[int]  # the request's running output; the engine appends to it
    forced: list[int] | None
    recording: Recording | None


class CaptureProcessor(LogitsProcessor):
    """Records float32 log-probs and forces tokens, per request (module docstring)."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is not None and not (
            isinstance(forced, list) and forced and all(isinstance(t, int) and t >= 0 for t in forced)
        ):
            raise ValueError(f"extra_args[{FORCED!r}] must be a non-empty list of token ids >= 0, got {forced!r}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _prompt_ids, output_ids in batch_update.added:
            args = params.extra_args or {}
            forced, key = args.get(FORCED), args.get(RECORD)
            self._rows.pop(index, None)  # a new request may replace the one that held this row
            if forced is not None or key is not None:
                # in an engine of another process the key is unknown: nothing is recorded, and the caller notices
                self._rows[index] = _Row(output_ids, forced, RECORDINGS.get(key) if key is not None else None)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        recorded = [(i, row) for i, row in self._rows.items() if row.recording is not None]
        if recorded:
            logprobs = logits[[i for i, _ in recorded]].log_softmax(dim=-1, dtype=torch.float32).cpu()
            for values, (_, row) in zip(logprobs, recorded, strict=True):
                assert row.recording is not None
                row.recording.write(len(row.output_ids), values)
        forced = [
            (i, row.forced[len(row.output_ids)])
            for i, row in self._rows.items()
            if row.forced is not None and len(row.output_ids) < len(row.forced)
        ]
        if forced:
            rows, tokens = zip(*forced, strict=True)
            logits[list(rows)] = float("-inf")
            logits[list(rows), list(tokens)] = 0.0
        return logits
