# SPDX-License-Identifier: Apache-2.0
"""Buckets: flat byte buffers in which a payload travels, laid out alike on both sides from the manifest alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import RefitError
from vllm_quads.refit.manifest import TensorSpec

ALIGNMENT = 256
"""Tensors begin at multiples of this many bytes, as allocations on a GPU do."""


@dataclass(frozen=True)
class BucketLayout:
    """Which tensors lie where in one buffer."""

    entries: tuple[tuple[str, TensorSpec, int], ...]
    """(name, spec, byte offset)."""
    nbytes: int
    """Bytes that the buffer needs."""

    def pack(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> Tensor:
        """Copy the tensors of this bucket into a uint8 buffer [>= nbytes]; returns the part that has to travel."""
        for name, view in self.unpack(buffer):
            view.copy_(tensors[name], non_blocking=True)
        return buffer[: self.nbytes]

    def unpack(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Named views into a uint8 buffer. Raises RefitError if it is too short."""
        if buffer.dtype != torch.uint8 or buffer.numel() < self.nbytes:
            raise RefitError(f"bucket: has {buffer.numel()} elements of {buffer.dtype}, expected {self.nbytes} bytes")
        return [
            (name, buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
            for name, spec, offset in self.entries
        ]


def plan_buckets(tensors: Mapping[str, TensorSpec], bucket_bytes: int) -> list[BucketLayout]:
    """Consecutive tensors in buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    The same manifest gives the same layouts on both sides, so that only bytes have to travel.
    """
    layouts: list[BucketLayout] = []
    entries: list[tuple[str, TensorSpec, int]] = []
    end = 0
    for name, spec in tensors.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if entries and offset + spec.nbytes > bucket_bytes:
            layouts.append(BucketLayout(tuple(entries), end))
            entries, offset = [], 0
        entries.append((name, spec, offset))
        end = offset + spec.nbytes
    if entries:
        layouts.append(BucketLayout(tuple(entries), end))
    return layouts


def largest(layouts: Iterable[BucketLayout]) -> int:
    """Bytes of the largest bucket: what a buffer has to hold."""
    return max((layout.nbytes for layout in layouts), default=0)
