# SPDX-License-Identifier: Apache-2.0
"""Refits under captured CUDA graphs, which replay old addresses: the new weights have to be at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import start_engine, stop_engine
from plugin_helpers import decoded, scores
from serving_helpers import ON_GPU
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("vllm")

from trainer_qat import RolloutSync, export_checkpoint, prepare_qat
from trainer_qat.push_stream import PushStream
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.engine import VllmEngine
from vllm_quads.refit import Manifest, Rollback, as_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]},
    **ON_GPU,
}


@pytest.fixture(scope="module")
def source(make_tiny: Callable[..., Path]) -> Path:
    """A model that the fused kernels take."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64}
    return make_tiny("qwen3_moe", num_experts=8, **sizes)


@pytest.fixture(scope="module")
def served(source: Path) -> Iterator[Any]:
    """The engine that is refitted."""
    llm = start_engine(source, **GRAPHS)
    yield llm
    stop_engine(llm)


def trainer(source: Path, seed: int) -> nn.Module:
    """The model with other weights, prepared, on the GPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).cuda()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, device="cuda").mul_(0.1).to(p.dtype))
    prepare_qat(model)
    return model


def test_pushes_under_graphs_equal_a_load(
    served: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After packed and BF16 pushes an engine with captured graphs has the log-probs that it has after vLLM's own
    loaders read the exported checkpoint, bit for bit; after a failed push with an undo log those of before; without one
    it refuses until the next push. (One engine: a start takes half a minute.)"""
    first, second = trainer(source, 1), trainer(source, 2)
    before = scores(served)
    exported = export_checkpoint(first, tmp_path / "out")
    served.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "out")})
    expected = scores(served)
    assert as_engine(served).fingerprint() == exported.fingerprint
    sync = RolloutSync(first, served)
    for packed in (True, False):
        RolloutSync(second, served).push(packed=packed)
        assert scores(served) not in (expected, before)
        report = sync.push(packed=packed)
        assert report.fingerprint == exported.fingerprint == as_engine(served).fingerprint()
        assert scores(served) == expected

    sync.push()
    load = VllmEngine.load

    def dying(self: VllmEngine, stream: Any) -> None:
        def half() -> Iterator[tuple[str, Tensor]]:
            for i, item in enumerate(stream):
                if i == 30:
                    raise OSError("the trainer has died")
                yield item

        load(self, half())

    for rollback in Rollback:
        with monkeypatch.context() as patch:
            patch.setattr(VllmEngine, "load", dying)
            with pytest.raises(RefitError, match="the trainer has died"):
                RolloutSync(second, served).push(rollback=rollback)
        if rollback is Rollback.HOST:
            assert scores(served) == expected
            continue
        for _ in range(3):
            with pytest.raises(RefitError, match="this engine cannot serve"):
                scores(served)
        for _ in range(3):  # a prompt of one token is decoded by the whole captured graph, which runs no Python
            with pytest.raises(RefitError, match="this engine cannot serve"):
                decoded(served, [17])
    sync.push()
    assert scores(served) == expected


def test_tensors_that_arrive_on_two_streams_in_turn(served: Any, source: Path) -> None:
    """As vLLM's NCCL engine delivers them: what a stream brings late is waited for on the other one, and memory that it
    gives back is not taken while the other one reads it."""
    sync = RolloutSync(trainer(source, 5), served)
    expected = sync.push().fingerprint
    values, rollout, payload = scores(served), as_engine(served), sync.payload
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for packed in (True, False):
        RolloutSync(trainer(source, 6), served).push()
        push = PushStream(payload, packed=packed, digest=False)
        push.check()
        ready = [(name, t.clone()) for name, t in push.tensors()]
        rollout.begin(Manifest(payload.contract, payload.quantized, push.specs(), rollout.policy_version() + 1))
        for i, (name, tensor) in enumerate(ready):
            streams[i % 2].synchronize()
            with torch.cuda.stream(streams[i % 2]):
                torch.cuda._sleep(10_000_000)
                rollout.load([(name, tensor.clone())])
        assert rollout.commit().fingerprint == rollout.fingerprint() == expected
        assert scores(served) == values


def test_a_sharded_trainer_pushes_the_same(served: Any, source: Path) -> None:
    """FSDP2 (on one rank; on two: benchmarks/refit_two_gpus.py) quantizes to the bytes of the plain model."""
    plain, sharded = trainer(source, 3), trainer(source, 3)
    expected = RolloutSync(plain, served).push().fingerprint
    values = scores(served)
    RolloutSync(trainer(source, 4), served).push()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    for packed in (True, False):
        assert RolloutSync(sharded, served).push(packed=packed).fingerprint == expected
        assert scores(served) == values
