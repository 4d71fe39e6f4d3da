# SPDX-License-Identifier: Apache-2.0
"""Collects log-probs of both sides between two log lines, so that p99, max and effective sample size are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_qat.mismatch import MismatchReport, as_mask, measure
from vllm_quads.nvfp4 import QuadsError


class GapRecorder:
    """Mismatch over everything that was added since the last `flush`."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, trainer: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Log-probs of sampled tokens, [B, T] of any float dtype and device, and the mask of those that count.

        A token without a log-prob of the rollout (NaN) does not count. Raises QuadsError if shapes differ.
        """
        if not trainer.shape == rollout.shape == mask.shape or trainer.dim() != 2:
            raise QuadsError(
                f"gap: trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask {tuple(mask.shape)} "
                f"need one shape [B, T]"
            )
        counts = as_mask(mask) & ~torch.isnan(rollout)
        self._rows.append(tuple(x.detach().cpu() for x in (trainer, rollout, counts)))  # type: ignore[arg-type]

    def flush(self) -> MismatchReport | None:
        """The report of what was added, which is then forgotten; None if no token was."""
        rows, self._rows = self._rows, []
        width = max((t.shape[1] for t, _, _ in rows), default=0)
        if not any(bool(m.any()) for _, _, m in rows):
            return None
        padded = [[torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in row] for row in rows]
        trainer, rollout, mask = (torch.cat([row[i] for row in padded]) for i in range(3))
        return measure(trainer, rollout, mask)


def loggable(values: dict[str, float]) -> dict[str, float]:
    """Without what a JSON logger cannot write: NaN and infinities (`infinite` tells of the latter)."""
    return {k: v for k, v in values.items() if v == v and abs(v) != float("inf")}
