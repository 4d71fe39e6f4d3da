# SPDX-License-Identifier: Apache-2.0
"""Rounding differences at will: a share of a running engine's BF16 activations moves by one unit in the last place.

Two machines that sum in another order, or round an intermediate once more, differ in exactly this way. What a model
makes of such differences is its own property, and tells what to expect between machines whatever their kernels are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm_quads.nvfp4 import QuadsError

_PARTS = re.compile(r"(^|\.)layers\.\d+\.[^.]+$")
"""Direct children of the decoder layers: both norms, attention, feed-forward block."""


def nudge(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A copy of bfloat16 `x` in which each element moves, with probability `share`, one value up or down.

    Zeros stay, and what would become infinite stays.
    """
    moves = torch.rand(x.shape, generator=generator, device=x.device) < share
    steps = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=torch.int16) * 2 - 1
    bits = x.contiguous().view(torch.int16)
    moved = torch.where(moves & (x != 0), bits + steps, bits).view(x.dtype)
    return torch.where(moved.isfinite(), moved, x)


@contextlib.contextmanager
def nudged(llm: Any, share: float, seed: int = 0) -> Iterator[int]:
    """Inside of the block every norm, attention and feed-forward block of the engine's decoder layers is nudged.

    For engines in this process, with `enforce_eager`. Yields how many modules that are. Raises QuadsError if none is.
    """
    hooks = llm.collective_rpc(partial(_install, share=share, seed=seed))[0]
    try:
        if not hooks:
            raise QuadsError("the model has no modules `layers.N.*` whose outputs could be nudged")
        yield len(hooks)
    finally:
        for hook in hooks:
            hook.remove()


def _install(worker: Any, *, share: float, seed: int) -> list[Any]:
    model: nn.Module = worker.get_model()
    generators: dict[torch.device, torch.Generator] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or x.dtype != torch.bfloat16:
            return None
        if x.device not in generators:
            generators[x.device] = torch.Generator(device=x.device).manual_seed(seed)
        x = nudge(x, share, generators[x.device])
        return (x, *output[1:]) if isinstance(output, tuple) else x

    return [m.register_forward_hook(hook) for name, m in model.named_modules() if _PARTS.search(name)]
