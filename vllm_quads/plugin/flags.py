# SPDX-License-Identifier: Apache-2.0
"""Conditions that the device knows before the host does: collected without waiting, asked together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_quads.kernels.install import BAD_GLOBAL, BAD_SCALE
from vllm_quads.nvfp4 import RefitError

_BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: ~(x.abs() < torch.inf),
    "global": lambda x: ~((x > 0) & (x < torch.inf)),
    "scale": lambda x: x >= 0x7F,
    "bad scale": lambda x: x & BAD_SCALE != 0,
    "bad global": lambda x: x & BAD_GLOBAL != 0,
}
"""What makes a value bad: an amax that is not finite, a global scale that is not a finite positive number, the largest
block scale as a byte (NaN or negative from 0x7F on), or the bit that a kernel has set for it."""


class Flags:
    """Values on the device, with the error that a bad one among them means."""

    def __init__(self) -> None:
        self._watched: dict[str, list[tuple[Tensor, str | Callable[[int], str]]]] = {kind: [] for kind in _BAD}

    def add(self, kind: str, value: Tensor, message: str | Callable[[int], str]) -> None:
        """Watch values [...] of a kind; they must not change before `check`. message: or what gives it for the index of
        a bad value."""
        self._watched[kind].append((value, message))

    def check(self) -> None:
        """Raise RefitError for the first bad value of each kind, and forget all; waits for the device once."""
        watched = {kind: entries for kind, entries in self._watched.items() if entries}
        self._watched = {kind: [] for kind in _BAD}
        if not watched:
            return
        bad = {kind: _BAD[kind](_joined([v for v, _ in entries])) for kind, entries in watched.items()}
        found = torch.stack([b.any() for b in bad.values()]).tolist()
        for kind, is_bad in zip(bad, found, strict=True):
            if is_bad:
                first = int(bad[kind].nonzero()[0, 0])
                for value, message in watched[kind]:
                    if first < value.numel():
                        raise RefitError(message if isinstance(message, str) else message(first))
                    first -= value.numel()


def _joined(values: list[Tensor]) -> Tensor:
    return values[0].flatten() if len(values) == 1 else torch.cat([v.flatten() for v in values])
