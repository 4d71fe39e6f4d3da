# SPDX-License-Identifier: Apache-2.0
"""One number per site that says how much the policy minds an error there.

To second order, output errors dy of a linear move the policy by KL = 0.5 E[(g . dy)^2] with g = d log p(sampled
token) / dy (the Fisher information seen from dy), and with errors that are uncorrelated across channels this is 0.5 x
(mean squared gradient) x (squared output error). The mean squared gradient is the site's sensitivity; measured output
error times sensitivity is what `Allocation.BUDGET` spends the blocks on.

All tokens of a batch share one backward pass: the gradients of different sampled tokens are uncorrelated under the
policy that sampled them, so the square of their sum has the expectation of the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer_qat.observe import Pass, observing
from trainer_qat.scoring import Batch, batches
from vllm_quads.nvfp4 import Contract, QuadsError


def sensitivities(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    contract: Contract | None = None,
    batch_size: int = 8,
) -> dict[str, float]:
    """Mean squared gradient of the sampled tokens' log-prob with respect to each site's output, per scored token.

    Args:
        model: a Hugging Face causal language model, prepared or not; its gradients are left as they were.
        prompt_ids, completion_ids: token ids; the completions should be the policy's own samples.
        contract: what is quantized; None takes that of a prepared model.
        batch_size: sequences per backward pass.

    Returns:
        Site name (`model.layers.0.mlp.experts.w13`, `....w2`, `model.layers.0.self_attn.qkv_proj`) -> scalar. The
        router's weight is part of w2's gradient. A site's value is averaged over output channels and, for experts,
        over the (token, expert) pairs of a token.

    Raises:
        QuadsError: there is no completion token, or a gradient is not finite.
    """
    tokens = sum(len(c) for c in completion_ids)
    if not tokens:
        raise QuadsError("sensitivities: the completions hold no token; give sequences that the policy sampled")
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = _Gradients()
    positions = 0
    with torch.enable_grad(), observing(model, contract, gradients.observe):
        for batch in batches(prompt_ids, completion_ids, batch_size, model):
            positions += batch.input_ids.numel()
            frozen = _freeze(parameters)
            try:
                _log_prob(model, batch).backward()
            finally:
                for p in frozen:
                    p.requires_grad_(True)
    return gradients.means(tokens, positions)


class _Gradients:
    """Squared gradients of the outputs of every site, summed as backward passes come by."""

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}
        self._channels: dict[str, dict[str, int]] = {}
        self._rows: dict[str, int] = {}

    def observe(self, p: Pass) -> None:
        """Take part in a forward pass."""
        # A site of several linears (q, k, v; per-expert modules) sums squares over them; y's rows are counted once
        # per matrix row, so pairs of per-expert modules add up to those of a fused stack.
        name = p.site.name
        matrices = self._channels.setdefault(name, {})
        part = p.matrix.rpartition(".")[2]
        matrices[part] = p.y.shape[-1]
        if part == next(iter(matrices)):
            self._rows[name] = self._rows.get(name, 0) + p.y.numel() // p.y.shape[-1]

        def add(grad: Tensor) -> None:
            total = grad.detach().to(torch.float64).square().sum()
            self._squares[name] = self._squares.get(name, torch.zeros_like(total)) + total

        if p.y.requires_grad:
            p.y.register_hook(add)

    def means(self, tokens: int, positions: int) -> dict[str, float]:
        """Per scored token, averaged over channels and a token's rows. Raises QuadsError if one is not finite."""
        out = {}
        for name, total in self._squares.items():
            # rows / positions is 1 for a dense linear and top-k for experts.
            width = sum(self._channels[name].values())
            out[name] = float(total) / (width * tokens * self._rows[name] / positions)
            if not torch.isfinite(total):
                raise QuadsError(
                    f"{name}: its gradient is not finite; the model has diverged or overflows in its dtype"
                )
        return dict(sorted(out.items()))


def _log_prob(model: nn.Module, batch: Batch) -> Tensor:
    """Sum, float32, of the log-probs of the completions' tokens, differentiable although no parameter is."""
    embedded = model.get_input_embeddings()(batch.input_ids).detach()  # type: ignore[operator]
    embedded.requires_grad_(True)
    logits = model(inputs_embeds=embedded, attention_mask=batch.attention_mask, position_ids=batch.positions).logits
    total: Tensor = logits.new_zeros((), dtype=torch.float32)
    for row, (first, last) in enumerate(batch.spans):
        log_probs = torch.log_softmax(logits[row, first:last].to(torch.float32), dim=-1)
        sampled = batch.input_ids[row, first + 1 : last + 1]
        total = total + log_probs.gather(1, sampled[:, None]).sum()
    return total


def _freeze(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    for p in parameters:
        p.requires_grad_(False)
    return list(parameters)
