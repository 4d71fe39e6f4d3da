# SPDX-License-Identifier: Apache-2.0
"""Digests of tensors as they travel: what is not quantized, hundreds of tensors of all sizes in a few launches.

Triton on GPUs, the reference elsewhere, the same values everywhere. Nothing waits for the device but `read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vllm_quads.kernels import weights as w
from vllm_quads.kernels._native import on_device
from vllm_quads.nvfp4.fingerprint import TENSOR_COLUMNS, as_words, tensor_digest

_ROWS = 16
"""Rows of words for one program, at most, unless a tensor has more than the largest launch takes."""
_PROGRAMS = (1, 16, 256, 4096)
"""Programs per tensor; tensors of like sizes share a launch."""
_HELD_BYTES = 64 * 1024**2
"""Memory that is held, at most, until there are more tensors for a launch."""


def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Digests int64 [n] of n tensors of one device, of any shapes and dtypes, as `tensor_digest`."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    if w._triton(tensors[0]) is None:
        return torch.stack([tensor_digest(t) for t in tensors])
    from vllm_quads.kernels.digests_triton import digest_tensors_kernel

    device = tensors[0].device
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    kept = []  # copies live until the launches are enqueued
    launches: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        nbytes, address = tensor.nbytes, tensor.data_ptr()
        if not nbytes:
            continue
        if nbytes % 4 or address % 4 or not tensor.is_contiguous():
            words = as_words(tensor.reshape(-1))
            kept.append(words)
            nbytes, address = words.nbytes, words.data_ptr()
        rows = -(-nbytes // (4 * TENSOR_COLUMNS))
        programs = next((p for p in _PROGRAMS if rows <= p * _ROWS), _PROGRAMS[-1])
        launches.setdefault(programs, []).extend((address, nbytes // 4, i))
    for programs, entries in launches.items():
        table = torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True)
        with on_device(device):
            digest_tensors_kernel[(programs, len(entries) // 3)](table, out, COLUMNS=TENSOR_COLUMNS, num_warps=w._WARPS)
    return out


class TensorDigests:
    """Digests of named tensors, started some at a time and read together."""

    def __init__(self) -> None:
        self._held: list[tuple[str, Tensor]] = []
        self._bytes = 0
        self._started: list[tuple[list[str], Tensor]] = []
        self._read: dict[str, int] | None = None

    def add(self, name: str, tensor: Tensor, *, resident: bool = False) -> None:
        """Digest a tensor, which has to stay as it is, later: it is held, and started with others. resident: it lies in
        memory anyway, so that any number may be held until `read`."""
        self._held.append((name, tensor))
        self._bytes += 0 if resident else tensor.nbytes
        if self._bytes >= _HELD_BYTES:
            self.start()

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digest tensors at once, as they are now (on a GPU: in the order of the current stream)."""
        self._held += tensors
        self.start()

    def start(self) -> None:
        """Digest what is held, and let it go."""
        if not self._held:
            return
        held, self._held, self._bytes, self._read = self._held, [], 0, None
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in held:
            by_device.setdefault(tensor.device, []).append((name, tensor))
        for entries in by_device.values():
            self._started.append(([name for name, _ in entries], digest_tensors([t for _, t in entries])))

    def read(self) -> dict[str, int]:
        """Digest of each tensor, 0 .. 2^64; waits once for each device that they are on."""
        self.start()
        if self._read is None:
            self._read = {}
            by_device: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
            for names, digests in self._started:
                by_device.setdefault(digests.device, []).append((names, digests))
            for parts in by_device.values():
                values = torch.cat([digests for _, digests in parts]).tolist()
                names = [name for own, _ in parts for name in own]
                self._read |= {name: value % (1 << 64) for name, value in zip(names, values, strict=True)}
        return self._read


__all__ = ["TensorDigests", "digest_tensors"]
