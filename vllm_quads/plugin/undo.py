# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors in host memory, taken before they are overwritten, to put back after a failed refit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vllm_quads.plugin.pinned import PinnedArena, padded


class UndoLog:
    """Saves tensors by key. Copies are ordered with other work of the current stream, and wait for nothing.

    On a GPU the buffers are pinned, which takes seconds for gigabytes, so they are kept from refit to refit.
    """

    def __init__(self) -> None:
        self._arena = PinnedArena()
        self._pinned: dict[str, Tensor] = {}
        self._saved: dict[str, tuple[Tensor, Tensor]] = {}

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Pin memory for these tensors at once, if they are on a GPU and nothing has been saved yet."""
        if not self._pinned:
            self._arena.reserve(sum(padded(t.nbytes) for t in tensors if t.is_cuda))

    def save(self, key: str, tensor: Tensor) -> None:
        """Copy a tensor aside unless that was done already."""
        if key in self._saved:
            return
        buffer = self._buffer(key, tensor)
        buffer.copy_(tensor, non_blocking=True)
        self._saved[key] = (tensor, buffer)

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        buffer = self._pinned.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._pinned[key] = self._arena.take(tensor)
        return buffer

    def restore(self) -> None:
        """Copy everything that was saved back to where it was."""
        with torch.inference_mode():  # what was made in it can only be changed in it
            for tensor, buffer in self._saved.values():
                tensor.copy_(buffer, non_blocking=True)
        if any(tensor.is_cuda for tensor, _ in self._saved.values()):
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Forget what was saved; pinned buffers stay, others are given back."""
        self._saved.clear()
