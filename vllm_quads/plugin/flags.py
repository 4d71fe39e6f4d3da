# SPDX-License-Identifier: Apache-2.0
"""Conditions that the device knows before the host does: collected without waiting, asked together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.kernels.install import BAD_GLOBAL, BAD_SCALE
from vllm_quads.nvfp4 import RefitError


@dataclass(frozen=True)
class _Kind:
    """Values of which some may be bad."""

    is_bad: Callable[[Tensor], Tensor]
    """Of each value."""
    extremes: Callable[[Tensor], tuple[Tensor, ...]]
    """Scalars that say whether any is bad: what a device needs few kernels for."""
    are_bad: Callable[..., bool]
    """Whether they say so."""


def _bit(bit: int) -> _Kind:
    return _Kind(lambda x: x & bit != 0, lambda x: ((x & bit).amax(),), lambda most: most > 0)


_KINDS = {
    # max |x| of weights: bad if they hold NaN or Inf, which it then is
    "amax": _Kind(lambda x: ~(x < torch.inf), lambda x: (_largest(x),), lambda most: not most < math.inf),
    "global": _Kind(
        lambda x: ~((x > 0) & (x < torch.inf)), torch.aminmax, lambda least, most: not (least > 0 and most < math.inf)
    ),
    # the largest block scale as a byte: NaN or negative from 0x7F on
    "scale": _Kind(lambda x: x >= 0x7F, lambda x: (_largest(x),), lambda most: most >= 0x7F),
    # what a kernel has found
    "bad scale": _bit(BAD_SCALE),
    "bad global": _bit(BAD_GLOBAL),
}


class Flags:
    """Values on the device, with the error that a bad one among them means."""

    def __init__(self) -> None:
        self._watched: dict[str, list[tuple[Tensor, str | Callable[[int], str]]]] = {kind: [] for kind in _KINDS}

    def add(self, kind: str, value: Tensor, message: str | Callable[[int], str]) -> None:
        """Watch values [...] of a kind; they must not change before `check`. message: or what gives it for the index of
        a bad value."""
        if value.numel():
            self._watched[kind].append((value, message))

    def check(self) -> None:
        """Raise RefitError for the first bad value of each kind, and forget all; waits for the device once."""
        watched = {kind: entries for kind, entries in self._watched.items() if entries}
        self._watched = {kind: [] for kind in _KINDS}
        if not watched:
            return
        values = {kind: _joined([v for v, _ in entries]) for kind, entries in watched.items()}
        extremes = {kind: _KINDS[kind].extremes(x) for kind, x in values.items()}
        found = iter(torch.stack([x.to(torch.float32) for own in extremes.values() for x in own]).tolist())
        for kind, own in extremes.items():
            if _KINDS[kind].are_bad(*[next(found) for _ in own]):
                first = int(_KINDS[kind].is_bad(values[kind]).nonzero()[0, 0])
                for value, message in watched[kind]:
                    if first < value.numel():
                        raise RefitError(message if isinstance(message, str) else message(first))
                    first -= value.numel()


def _joined(values: list[Tensor]) -> Tensor:
    return values[0].flatten() if len(values) == 1 else torch.cat([v.flatten() for v in values])


def _largest(x: Tensor) -> Tensor:
    return x[0] if x.numel() == 1 else x.amax()
