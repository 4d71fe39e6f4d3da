# SPDX-License-Identifier: Apache-2.0
"""BF16 checkpoints are quantized by stacks of experts while they load: same bytes, same errors, little memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from layer_helpers import PREFIX, SHARDS, load_expert, moe_layer
from plugin_helpers import damaged
from serving_helpers import ON_GPU
from torch import Tensor

pytest.importorskip("vllm")

from vllm_quads.checkpoint import load_packed, quantize_checkpoint
from vllm_quads.nvfp4 import CheckpointError, PackedTensor, RefitError, fingerprint_of
from vllm_quads.plugin import quantizing
from vllm_quads.refit import as_engine

EXPERTS, HIDDEN, INTER = 32, 128, 64
Key = tuple[int, str]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device that a layer is made on, as vLLM's default device."""
    with torch.device(request.param):
        yield request.param


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[Key, Tensor]:
    """Every matrix of the layer, on the CPU as a file is read; outliers in the last shard of two experts."""
    g = torch.Generator().manual_seed(0)
    shapes = {"w2": (HIDDEN, INTER), "w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN)}
    out = {
        (e, s): torch.randn(*shape, generator=g, device="cpu").to(dtype)
        for e in range(EXPERTS)
        for s, shape in shapes.items()
    }
    out[1, "w3"][-1, -1] = 40.0
    out[2, "w2"][-1, -1] = 40.0
    return out


def expected(source: dict[Key, Tensor]) -> dict[str, PackedTensor]:
    """What each matrix becomes, one by one by the reference on the CPU."""
    out = {}
    with torch.device("cpu"):
        for (e, s), w in source.items():
            shared = [source[e, s]] if s == "w2" else [source[e, "w1"], source[e, "w3"]]
            amax = torch.stack([t.to(torch.bfloat16).abs().amax().float() for t in shared]).amax()
            out[f"{PREFIX}.{e}.{SHARDS[s]}"] = PackedTensor.quantize(w, amax=amax)
    return out


def load_all(layer: Any, method: Any, source: dict[Key, Tensor], keys: list[Key]) -> None:
    """Load matrices in this order."""
    for key in keys:
        load_expert(layer, method, *key, source[key])


def assert_loaded(method: Any, source: dict[Key, Tensor]) -> None:
    """The layer's shards are those of the reference, bit for bit."""
    whole = expected(source)
    for m in method._loader.matrices:
        mine, theirs = method._loader.packed(m), whole[m.name]
        rows, (k, channels) = slice(m.local_n[0], sum(m.local_n)), m.local_k
        assert torch.equal(mine.codes.cpu(), theirs.codes[rows, k // 2 : (k + channels) // 2]), m.name
        scales = theirs.block_scales.view(torch.uint8)[rows, k // 16 : (k + channels) // 16]
        assert torch.equal(mine.block_scales.view(torch.uint8).cpu(), scales), m.name
        assert torch.equal(mine.decode_scale.cpu(), theirs.decode_scale), m.name


def orders() -> dict[str, list[Key]]:
    """Orders in which the matrices may come."""
    keys = list(weights())
    shuffled = list(keys)
    random.Random(1).shuffle(shuffled)
    by_name = sorted(keys, key=lambda key: f"{key[0]}.{SHARDS[key[1]]}")
    return {"by name": by_name, "by part": sorted(keys, key=lambda key: key[1]), "shuffled": shuffled}


@pytest.mark.parametrize("order", ["by name", "by part", "shuffled"])
def test_stacks_give_the_bytes_of_single_matrices(order: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which experts come, gate and up share a global scale and every byte is the reference's;
    fewer quantizations than matrices are made, and each tensor of the sender may be overwritten once it was taken."""
    calls: list[int] = []
    quantize = quantizing.quantize_stack
    monkeypatch.setattr(quantizing, "quantize_stack", lambda w, amax: calls.append(w.shape[0]) or quantize(w, amax))
    source = weights()
    layer, method = moe_layer(EXPERTS, HIDDEN, INTER)
    for key in orders()[order]:
        buffer = source[key].clone()
        load_expert(layer, method, *key, buffer)
        buffer.fill_(7)
    assert sum(calls) == len(source)
    assert len(calls) <= len(source) / 2
    method._loader.finish()
    assert_loaded(method, source)


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_shards_take_the_scale_of_the_whole(kind: str, device: str) -> None:
    """Ranks that hold rows, channels or experts get the shards of what one rank would hold; masters in FP32 are rounded
    to BF16 first."""
    source = weights(torch.float32)
    for rank in range(2):
        layer, method = moe_layer(EXPERTS, HIDDEN, INTER, **{kind: (rank, 2)})
        load_all(layer, method, source, orders()["by name"])
        method._loader.finish()
        assert_loaded(method, source)


@pytest.mark.parametrize("order", ["by name", "by part"])
def test_waiting_weights_are_less_than_a_layer(order: str, device: str) -> None:
    """Beside the packed layer, loading holds at no time more than the layer's BF16 bytes; at the end nothing."""
    source, keys = weights(), orders()[order]
    layer_bytes = sum(w.nbytes for w in source.values())
    layer, method = moe_layer(EXPERTS, HIDDEN, INTER)
    method._loader.write_waiting()
    peaks = []
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for key in keys:
        load_expert(layer, method, *key, source[key])
        loader = method._loader
        pending = [s.pending for s in loader._status.values() if s.pending is not None]
        peaks.append(sum(t.nbytes for t in pending) + loader._waiting.floats._bytes)
    assert peaks[-1] == 0
    assert max(peaks) <= layer_bytes * (0.6 if order == "by part" else 0.3)
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() - before <= layer_bytes
        assert torch.cuda.memory_allocated() - before <= 2**16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damage_in_one_expert_is_named(value: float, device: str) -> None:
    """NaN or Inf in one of many experts is an error that names its tensor, the layer serves no mixture afterwards, and
    takes good weights again."""
    source = weights()
    layer, method = moe_layer(EXPERTS, HIDDEN, INTER)
    loader = method._loader
    good = source[9, "w3"].clone()
    source[9, "w3"][5, 7] = value
    name = r"experts\.9\.up_proj\.weight: holds NaN or Inf"
    with pytest.raises(CheckpointError, match=name):
        load_all(layer, method, source, orders()["by name"])
    with pytest.raises(RefitError, match=rf"{name}.*load them again"):
        loader.check_settled()
    assert loader.is_partial()
    source[9, "w3"] = good
    load_all(layer, method, source, orders()["shuffled"])
    loader.check_settled()
    loader.finish()
    assert_loaded(method, source)


def test_experts_that_come_alone_are_written_when_asked(device: str) -> None:
    """vLLM's raw route may change one expert and announce no end: whoever looks at the layer sees the new weights, and
    an unfinished pair or a damaged weight is an error then."""
    source = weights()
    layer, method = moe_layer(EXPERTS, HIDDEN, INTER)
    loader = method._loader
    load_all(layer, method, source, list(source))
    loader.finish()
    version = loader.version
    source |= {(3, s): source[3, s] * 3 for s in SHARDS}
    for s in SHARDS:
        load_expert(layer, method, 3, s, source[3, s])
    assert loader.version > version
    assert_loaded(method, source)
    load_expert(layer, method, 4, "w1", source[4, "w1"])
    with pytest.raises(RefitError, match=r"experts\.4\.up_proj\.weight: was not sent"):
        loader.check_settled()
    loader.forget_partial()
    load_expert(layer, method, 5, "w2", source[5, "w2"] * torch.nan)
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight: holds NaN"):
        loader.check_settled()
    with pytest.raises(RefitError, match=r"experts\.5\.down_proj\.weight: holds NaN"):
        loader.check_settled()
    load_expert(layer, method, 5, "w2", source[5, "w2"])
    loader.check_settled()
    assert_loaded(method, source)


def test_missing_and_misshapen_experts_are_named(device: str) -> None:
    """A tensor of another shape is refused when it comes, a missing one at the end."""
    source = weights()
    layer, method = moe_layer(EXPERTS, HIDDEN, INTER)
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight: has shape \(128, 48\), expected"):
        load_expert(layer, method, 0, "w2", source[0, "w2"][:, :48])
    load_all(layer, method, source, [key for key in source if key != (7, "w1")])
    with pytest.raises(CheckpointError, match=r"experts\.7\.gate_proj\.weight: is missing"):
        method._loader.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_engine_on_a_gpu_has_the_fingerprint_of_the_checkpoint(tmp_path: Path, engine: Callable[..., Any]) -> None:
    """A BF16 checkpoint that a GPU quantizes while it loads has the fingerprint of the one that `quads quantize` writes
    on the CPU; a NaN in one expert stops the engine by name."""
    conftest._save("qwen3_moe", tmp_path / "bf16", 0, num_experts=16, hidden_size=256, moe_intermediate_size=128)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "packed")
    served = as_engine(engine(tmp_path / "bf16", **ON_GPU))
    packed = {name: load_packed(tmp_path / "packed", name) for name in served.quantized().shapes}
    assert served.fingerprint() == fingerprint_of(packed)
    name = "model.layers.1.mlp.experts.11.down_proj.weight"
    bad = damaged(tmp_path / "bf16", tmp_path / "bad", lambda t: t[name][3, 3].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=rf"{name}: holds NaN or Inf"):
        engine(bad, **ON_GPU)
