# SPDX-License-Identifier: Apache-2.0
"""Memory while a BF16 checkpoint is quantized at load."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm")

from vllm_quads.plugin.loading import PackedLoader

HIDDEN, INTER, LAYERS, EXPERTS, VOCAB = 256, 256, 6, 24, 256


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def test_loading_needs_the_packed_model_and_less_than_one_layer(
    make_tiny: Callable[..., Path], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantizing a BF16 checkpoint while it loads peaks at the NVFP4 model plus at most one layer of BF16 experts."""
    model = make_tiny(
        "qwen3_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        vocab_size=VOCAB,
    )
    tracker = LiveBytes()
    loaded: list[int] = []
    finish = PackedLoader.finish

    def noting(self: PackedLoader, **options: Any) -> None:
        finish(self, **options)
        loaded.append(tracker.peak)  # the last of these is the end of loading

    monkeypatch.setattr(PackedLoader, "finish", noting)
    with tracker:
        llm = engine(model)
    layer = EXPERTS * 3 * HIDDEN * INTER * 2
    served = llm.apply_model(lambda m: sum(p.nbytes for p in m.parameters()))[0]
    assert len(loaded) == LAYERS
    assert served < 0.4 * LAYERS * layer + 2e6, "the served model is not packed"
    assert loaded[-1] > 0.9 * served, "the tracker has missed the model itself"
    assert loaded[-1] <= served + layer, f"{loaded[-1] / 1e6:.1f} MB, model {served / 1e6:.1f}, layer {layer / 1e6:.1f}"
