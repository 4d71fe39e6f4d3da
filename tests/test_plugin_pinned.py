# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of the undo log, with a CUDA runtime that only writes down what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_quads.plugin import pinned
from vllm_quads.plugin.pinned import PinnedArena, padded


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Calls of the runtime and their sizes (or addresses)."""
    calls: list[tuple[str, int]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("register", nbytes)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return calls


def test_one_region_serves_what_was_reserved(asked: list[tuple[str, int]]) -> None:
    """Tensors of one reservation lie aligned and apart in one pinned region, which is unpinned with its arena."""
    likes = [
        torch.ones(3, dtype=torch.float32), torch.ones(5, 7, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.uint8)
    ]  # fmt: skip
    arena = PinnedArena()
    arena.reserve(sum(padded(t.nbytes) for t in likes))
    taken = [arena.take(t) for t in likes]
    assert [name for name, _ in asked] == ["register"]
    assert [(t.shape, t.dtype) for t in taken] == [(t.shape, t.dtype) for t in likes]
    assert all(t.data_ptr() % 512 == taken[0].data_ptr() % 512 == 0 for t in taken)
    for t, like in zip(taken, likes, strict=True):
        t.copy_(like)
    assert all(torch.equal(t, like) for t, like in zip(taken, likes, strict=True)), "they overlap"
    arena.take(torch.ones(1 << 20, dtype=torch.uint8))
    assert [name for name, _ in asked] == ["register"] * 2
    del arena, t, taken
    assert sorted(name for name, _ in asked) == ["register"] * 2 + ["unregister"] * 2


def test_memory_that_cannot_be_registered(asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch pins instead, and CUDA's error does not stay for the next launch to report."""
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister = lambda *_: 1
    made: list[dict[str, Any]] = []

    def empty(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made.append({"pinned": pin_memory})
        return torch.zeros(size, **options)

    def launch(size: int, *, device: str) -> None:
        made.append({"device": device})
        raise RuntimeError("CUDA error: what the registration has left")

    monkeypatch.setattr(pinned, "torch", _Torch(empty, launch))
    taken = PinnedArena().take(torch.ones(1000, dtype=torch.uint8))
    assert taken.shape == (1000,)
    assert made == [{"device": "cuda"}, {"pinned": True}]


class _Torch:
    """torch with an `empty` and a `zeros` of our own."""

    def __init__(self, empty: Any, zeros: Any) -> None:
        self.empty, self.zeros = empty, zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
