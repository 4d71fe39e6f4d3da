# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two ranks: the same bytes and the same losses as one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainer_models import ALL_LINEARS, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import RolloutSync, export_checkpoint, prepare_qat
from trainer_qat.prepare import expert_weights, quantizers_of, remove_qat, state_of
from vllm_quads.nvfp4 import Contract, MismatchError, WeightGlobalScale, fake_quantize_weight

STEPS = 4
ONE_PROCESS = "one process: "


def train(model: nn.Module) -> list[float]:
    """A few optimizer steps on fixed batches, the same on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens(seed=i), labels=tokens(seed=i)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shard(model: nn.Module, units: str, policy: MixedPrecisionPolicy) -> None:
    """fully_shard by decoder layer, or with experts and q_proj as units of their own."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        if units == "small":
            fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=policy)
            fully_shard(layer.self_attn.q_proj, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


CASES: dict[str, dict[str, Any]] = {
    "prepare then shard": {"first": "prepare", "units": "layer"},
    "shard then prepare, small units": {"first": "shard", "units": "small"},
    "prepare then shard, small units, cached": {"first": "prepare", "units": "small", "cache": "dense"},
    "frozen scales, FP32 masters": {"first": "shard", "units": "layer", "frozen": True, "fp32": True},
}


def reference(case: dict[str, Any]) -> tuple[list[float], str]:
    """Losses and fingerprint of one process."""
    model = qwen3(dtype=torch.float32 if case.get("fp32") else torch.bfloat16)
    prepare_qat(model, contract_of(case), cache=case.get("cache", "auto"))
    losses = train(model)
    return losses, RolloutSync(model, None).payload.fingerprint()


def contract_of(case: dict[str, Any]) -> Contract:
    """All linears, live or frozen."""
    scale = WeightGlobalScale.FROZEN if case.get("frozen") else WeightGlobalScale.LIVE
    return Contract(targets=ALL_LINEARS.targets, weight_global_scale=scale)


def mixed_precision() -> str:
    """Whether the forward pass under FP32 masters and BF16 parameters sees the quantization of the masters."""
    model = qwen3(dtype=torch.float32)
    experts = model.model.layers[1].mlp.experts
    expected = fake_quantize_weight(experts.gate_up_proj.detach().to(torch.bfloat16))
    prepare_qat(model)
    shard(model, "layer", MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[torch.Tensor] = []
    experts.register_forward_pre_hook(lambda module, args: seen.append(expert_weights(module)[0]))
    model(tokens())
    return "equal" if torch.equal(seen[0], expected) else "differs"


def worker(rank: int, port: int, directory: str) -> None:
    """One rank: every case, then push and export."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    # In a process like those of the ranks: what else has run in pytest's own may change how FP32 sums are ordered.
    results = {ONE_PROCESS + name: reference(case) for name, case in CASES.items()} if rank == 0 else {}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, case in CASES.items():
        model = qwen3(dtype=torch.float32 if case.get("fp32") else torch.bfloat16)
        policy = MixedPrecisionPolicy()
        cache = case.get("cache", "auto")
        if case["first"] == "shard":
            shard(model, case["units"], policy)
            prepare_qat(model, contract_of(case), cache=cache)
        else:
            prepare_qat(model, contract_of(case), cache=cache)
            shard(model, case["units"], policy)
        losses = train(model)
        kept = sum(q.cache.hits + q.cache.misses for _, _, q in quantizers_of(model))
        assert (kept == 0) == (cache == "auto"), "AUTO keeps nothing under FSDP2"
        results[name] = (losses, RolloutSync(model, None).payload.fingerprint())
        last = model
    quantized = state_of(last).quantized
    engine = FakeEngine(contract_of(case), quantized) if rank == 0 else None
    report = RolloutSync(last, engine).push()
    exported = export_checkpoint(last, Path(directory) / "out")
    results["push"], results["export"] = ([], report.fingerprint), ([], exported.fingerprint)
    # An engine of another contract stops every rank, instead of leaving one waiting.
    if engine is not None:
        engine._contract = Contract()
    sync = RolloutSync(last, None)
    sync.engine = engine
    try:
        sync.push()
        results["mismatch"] = ([], "no error")
    except MismatchError:
        results["mismatch"] = ([], "mismatch here")
    except Exception as e:
        results["mismatch"] = ([], str(e))
    remove_qat(last)
    last(tokens())
    results["mixed"] = ([], mixed_precision())
    torch.save(results, f"{directory}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[list[float], str]]]:
    """Results of both ranks."""
    directory = tmp_path_factory.mktemp("fsdp")
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(worker, args=(port, str(directory)), nprocs=2, start_method="spawn")
    return [torch.load(directory / f"rank{r}.pt") for r in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_same_bytes_and_losses_as_one_process(ranks: list[dict[str, tuple[list[float], str]]], name: str) -> None:
    """Any order of prepare_qat and fully_shard, any units: equal losses, and equal bytes after training."""
    losses, fingerprint = ranks[0][ONE_PROCESS + name]
    assert losses[0] > losses[-1]
    for rank in ranks:
        assert rank[name] == (losses, fingerprint)
    assert ranks[0][name] == ranks[1][name]


def test_sharded_push_and_export(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """Gathered one parameter at a time, push and export give the fingerprint of the sharded weights on every rank."""
    last = list(CASES)[-1]
    assert {r[key][1] for r in ranks for key in ("push", "export", last)} == {ranks[0][last][1]}


def test_a_refused_push_stops_every_rank(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """The rank with the engine raises the error, the others learn of it; none hangs."""
    assert ranks[0]["mismatch"][1] == "mismatch here"
    assert ranks[1]["mismatch"][1].startswith("the push failed on rank 0: MismatchError")


def test_mixed_precision_quantizes_the_master(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """FP32 masters gathered as BF16 quantize to what a push of the masters sends."""
    assert {r["mixed"][1] for r in ranks} == {"equal"}
