# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probs of given completions: what a rollout's own log-probs are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vllm_quads.nvfp4 import QuadsError


def score(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    batch_size: int = 8,
) -> list[Tensor]:
    """Full log-distributions float32 [T, V] at each of the T positions of every completion, at temperature 1.

    Row t is the distribution that completion token t was drawn from, given the prompt and the tokens before it.
    Sequences are right-padded with an attention mask, so a result does not depend on its batch beyond rounding. The
    model keeps its mode and its fake quantization (see `qat_disabled` for the BF16 weights).
    """
    results: list[Tensor | None] = [None] * len(prompt_ids)
    with torch.no_grad():
        for batch in batches(prompt_ids, completion_ids, batch_size, model):
            logits = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.positions
            ).logits
            for row, index in enumerate(batch.indices):
                first, last = batch.spans[row]
                results[index] = torch.log_softmax(logits[row, first:last].to(torch.float32), dim=-1)
    return [r for r in results if r is not None]


def token_log_probs(distributions: Sequence[Tensor], token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probs float32 [T] of the given tokens under full distributions [T, V].

    Raises QuadsError if lengths differ.
    """
    if [len(d) for d in distributions] != [len(t) for t in token_ids]:
        raise QuadsError(
            f"token_log_probs: distributions for {[len(d) for d in distributions]} tokens, but "
            f"{[len(t) for t in token_ids]} tokens; give the completions that were scored"
        )
    return [
        d.gather(1, torch.tensor(list(t), device=d.device).reshape(-1, 1)).flatten()
        for d, t in zip(distributions, token_ids, strict=True)
    ]


class Batch:
    """Right-padded sequences prompt + completion."""

    def __init__(self, indices: list[int], prompts: list[list[int]], completions: list[list[int]]) -> None:
        self.indices = indices
        """Where these sequences stood in the input."""
        width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
        self.input_ids = torch.zeros(len(indices), width, dtype=torch.int64)
        self.attention_mask = torch.zeros_like(self.input_ids)
        self.spans = []
        """Per row, the positions [first, last) whose logits predict the completion."""
        for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            self.input_ids[row, : len(p) + len(c)] = torch.tensor(p + c)
            self.attention_mask[row, : len(p) + len(c)] = 1
            self.spans.append((len(p) - 1, len(p) + len(c) - 1))
        self.positions = torch.arange(width).expand_as(self.input_ids)

    def to(self, device: torch.device) -> Batch:
        """Move the tensors."""
        for name in ("input_ids", "attention_mask", "positions"):
            setattr(self, name, getattr(self, name).to(device))
        return self


def batches(
    prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], batch_size: int, model: nn.Module
) -> Iterator[Batch]:
    """Batches of similar length on the model's device. Raises QuadsError for an empty prompt."""
    if batch_size < 1:
        raise QuadsError(f"batch_size: is {batch_size}, expected at least 1")
    if len(prompt_ids) != len(completion_ids):
        raise QuadsError(f"score: {len(prompt_ids)} prompts but {len(completion_ids)} completions")
    for i, prompt in enumerate(prompt_ids):
        if len(prompt) == 0:
            raise QuadsError(f"score: prompt {i} is empty; the first completion token needs a token before it")
    device = next(model.parameters()).device
    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]) + len(completion_ids[i]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        prompts = [list(prompt_ids[i]) for i in indices]
        completions = [list(completion_ids[i]) for i in indices]
        yield Batch(indices, prompts, completions).to(device)
