# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU copies to at full speed, gigabytes of it within seconds.

`pin_memory=True` lets the driver allocate, fault in and pin page after page in one thread, which takes a second for
1.5 GB. Here threads touch large pages first, and the driver has only to pin them. The memory is private, for what is
shared gets no large pages on most systems, and children that are forked do not get it: they would make the kernel copy
pages that the GPU goes on writing to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_ALIGN = 512
_TOUCHED_AT_ONCE = 1 << 26
_PATIENCE = 0.15
"""Seconds for so much memory. Large pages that are free take 0.01; where the kernel has to move others out of their way
they take longer than small ones."""
_THREADS = 16


class PinnedArena:
    """Tensors in pinned host memory that is given back when the arena goes. Tensors must not outlive it."""

    def __init__(self) -> None:
        self._free: Tensor | None = None
        """Rest of the last region."""

    def reserve(self, nbytes: int) -> None:
        """Make one region from which `take` gives this many bytes (and what alignment needs), unless there is one."""
        if self._free is None or self._free.numel() < nbytes:
            self._free = self._region(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE) if nbytes else None

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype."""
        nbytes = padded(like.nbytes)
        if self._free is None or self._free.numel() < nbytes:
            self.reserve(nbytes)
        if not nbytes or self._free is None:
            return torch.empty(like.shape, dtype=like.dtype)
        taken, self._free = self._free[: like.nbytes], self._free[nbytes:]
        return taken.view(like.dtype).view(like.shape)

    def _region(self, nbytes: int) -> Tensor:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            _advise(memory, advice)
        region = torch.frombuffer(memory, dtype=torch.uint8)

        def touch(part: Tensor) -> None:
            start = time.perf_counter()
            part[:: mmap.PAGESIZE].zero_()
            if time.perf_counter() - start > _PATIENCE:
                _advise(memory, "MADV_NOHUGEPAGE")

        # Not one operation: engines tell torch to use one thread.
        parts = region.split(_TOUCHED_AT_ONCE)
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, _THREADS)) as pool:
            list(pool.map(touch, parts))
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(region.data_ptr(), nbytes, 0)) != 0:  # limits of the platform
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # or the next launch would report CUDA's last error as its own
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        # Holds the region, which must not go before it is unpinned.
        weakref.finalize(self, _unpin, region)
        return region


def padded(nbytes: int) -> int:
    """Bytes that a tensor of this size takes of an arena."""
    return -(-nbytes // _ALIGN) * _ALIGN


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the kernel, if it wants to know: what it does otherwise is slower, not wrong."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(getattr(mmap, advice))


def _unpin(region: Tensor) -> None:
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaHostUnregister(region.data_ptr())


__all__ = ["PinnedArena", "padded"]
