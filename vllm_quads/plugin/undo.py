# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors in host memory, taken before they are overwritten, to put back after a failed refit."""

from __future__ import annotations

import torch
from torch import Tensor


class UndoLog:
    """Saves tensors by key. Copies are ordered with other work of the current stream, and wait for nothing.

    On a GPU the buffers are pinned, which takes seconds for gigabytes, so they are kept from refit to refit.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}

    def save(self, key: str, tensor: Tensor) -> None:
        """Copy a tensor aside unless that was done already."""
        if key in self._saved:
            return
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(tensor, non_blocking=True)
        self._saved[key] = tensor

    def restore(self) -> None:
        """Copy everything that was saved back to where it was."""
        with torch.inference_mode():  # what was made in it can only be changed in it
            for key, tensor in self._saved.items():
                tensor.copy_(self._buffers[key], non_blocking=True)
        if any(t.is_cuda for t in self._saved.values()):
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Forget what was saved; pinned buffers stay, others are given back."""
        self._saved.clear()
        self._buffers = {k: b for k, b in self._buffers.items() if b.is_pinned()}
