# SPDX-License-Identifier: Apache-2.0
"""When fake quantization sets in: at a step, or over a ramp.

On a ramp the forward pass multiplies with w + a (qdq(w) - w), where the strength a grows linearly from 0 to 1. At a = 1
this is the rollout's weight; below, trainer and rollout differ on purpose, so the gap metrics shrink as a grows. The
gradient is straight-through at any strength; with `clamp_gradient` it is 1 - a where the quantizer saturates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer_qat.fake_quant import representable
from vllm_quads.nvfp4 import ContractError


@dataclass(frozen=True)
class Schedule:
    """Strength of fake quantization by optimizer step. Raises ContractError unless both are integers of at least 0."""

    start: int = 0
    """Optimizer steps taken with plain weights."""
    ramp: int = 0
    """Steps over which the strength grows to 1: it is (i + 1) / ramp at step start + i. 0 switches on at once."""

    def __post_init__(self) -> None:
        for name in ("start", "ramp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ContractError(f"schedule.{name}: is {value!r}, expected an integer of at least 0")

    def strength(self, step: int) -> float:
        """Strength 0 to 1 of the forward passes after `step` optimizer steps."""
        if step < self.start:
            return 0.0
        return min(1.0, (step - self.start + 1) / self.ramp) if self.ramp else 1.0


@dataclass
class Progress:
    """Where a schedule stands. Compiled graphs depend on the phase only; the strength is data to them."""

    schedule: Schedule = field(default_factory=Schedule)
    step: int = 0
    """Optimizer steps taken."""
    active: bool = field(init=False, default=True)
    """False while the strength is 0."""
    ramping: bool = field(init=False, default=False)
    """True while the strength is between 0 and 1."""
    strength: Tensor = field(init=False, default_factory=lambda: torch.ones((), dtype=torch.float32))
    """float32 scalar on the CPU."""
    watched_from: int | None = None
    """Count of the process's optimizer steps at which somebody should begin to call `qat_step`; None if none has to."""

    counted_at: int | None = None
    """Count of the process's optimizer steps at the last `qat_step`."""
    driven: bool = False
    """True once optimizer steps were seen between two calls of `qat_step`."""
    warned: bool = False
    """True once it has been said that steps are counted twice."""

    def __post_init__(self) -> None:
        self.move_to(self.step)

    def move_to(self, step: int) -> None:
        """Continue after this many optimizer steps."""
        a = self.schedule.strength(step)
        self.step, self.active, self.ramping = step, a > 0.0, 0.0 < a < 1.0
        self.strength.fill_(a)


@torch.library.custom_op("quads::mix_weight", mutates_args=())
def mix_weight(weight: Tensor, quantized: Tensor, strength: Tensor) -> Tensor:
    """w + a (q - w) in float32, rounded once to the weight's dtype; strength a: float32 scalar on the CPU."""
    w, q = weight.to(torch.float32), quantized.to(torch.float32)
    return torch.lerp(w, q, strength.item()).to(weight.dtype)


@mix_weight.register_fake
def _(weight: Tensor, quantized: Tensor, strength: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


class RampedClamp(torch.autograd.Function):
    """Forward: the mixed weight. Backward: the gradient, times 1 - a where the quantizer saturates."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mixed: Tensor, amax: Tensor, strength: Tensor) -> Tensor:
        ctx.save_for_backward(weight, amax, strength.clone())  # the next step changes the strength in place
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, amax, strength = ctx.saved_tensors
        grad = grads[0]
        outside = grad * (1 - strength).to(device=grad.device, dtype=grad.dtype)
        return torch.where(representable(weight, amax), grad, outside), None, None, None
