# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two ranks: the same bytes and the same losses as one process."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_engine import FakeEngine
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trainer_models import ALL_LINEARS, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import (
    CacheMode,
    RolloutSync,
    Schedule,
    calibrate,
    export_checkpoint,
    follow_optimizer,
    prepare_qat,
    push_stream,
)
from trainer_qat.payload import Payload
from trainer_qat.prepare import expert_weights, quantizers_of, remove_qat, state_of
from trainer_qat.push_stream import PushStream
from vllm_quads.nvfp4 import Contract, WeightGlobalScale, fake_quantize_weight

STEPS = 4
CHANGED = "model.layers.0.mlp.experts.down_proj"
ONE_PROCESS = "one process: "
LORA_UNITS = ("layers", "wrapper")
"""What is sharded: the decoder layers, and PEFT's wrapper of the model as well."""


def train(model: nn.Module, half: int | None = None) -> list[float]:
    """A few optimizer steps on fixed batches, the same on every rank, or with row `half` of them on this one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    follow_optimizer(model, optimizer)
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        ids = tokens(seed=i) if half is None else tokens(seed=i)[half : half + 1]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def last_dimension(parameter: nn.Parameter) -> Shard:
    """Shard along K, which cuts rows (and, at this size, not the 16-channel blocks) apart."""
    return Shard(parameter.dim() - 1)


def middle_dimension(parameter: nn.Parameter) -> Shard:
    """Shard the rows of every expert, gate rows on one rank and up rows on the other."""
    return Shard(max(0, parameter.dim() - 2))


def shard(
    model: nn.Module, units: str, policy: MixedPrecisionPolicy, placement: Any = None, hybrid: bool = False
) -> None:
    """fully_shard by decoder layer, or with experts and q_proj as units of their own; hybrid: replicas of one shard."""
    mesh = (
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
        if hybrid
        else init_device_mesh("cpu", (2,))
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": placement}
    for layer in model.model.layers:
        if units == "small":
            fully_shard(layer.mlp.experts, **options)
            fully_shard(layer.self_attn.q_proj, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)


CASES: dict[str, dict[str, Any]] = {
    "prepare then shard": {"first": "prepare", "units": "layer"},
    "shard then prepare, small units": {"first": "shard", "units": "small"},
    "prepare then shard, small units, cached": {"first": "prepare", "units": "small", "cache": "dense"},
    "hybrid: replicas": {"first": "prepare", "units": "layer", "hybrid": True},
    "sharded along K, moving-average scales, ramp": {
        "first": "prepare",
        "units": "small",
        "placement": last_dimension,
        "scale": WeightGlobalScale.MOVING_AVERAGE,
        "schedule": Schedule(start=1, ramp=2),
    },
    "frozen scales, FP32 masters, sharded along N": {
        "first": "shard",
        "units": "layer",
        "placement": middle_dimension,
        "scale": WeightGlobalScale.FROZEN,
        "fp32": True,
    },
}


def reference(case: dict[str, Any]) -> tuple[list[float], str]:
    """Losses and fingerprint of one process."""
    model = qwen3(dtype=torch.float32 if case.get("fp32") else torch.bfloat16)
    prepare_qat(model, contract_of(case), cache=case.get("cache", "auto"), schedule=case.get("schedule"))
    losses = train(model)
    return losses, RolloutSync(model, None).payload.fingerprint()


def contract_of(case: dict[str, Any]) -> Contract:
    """All linears, live or frozen."""
    return Contract(targets=ALL_LINEARS.targets, weight_global_scale=case.get("scale", WeightGlobalScale.LIVE))


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


def outcome(action: Callable[[], object]) -> str:
    """The error of an action, as text."""
    try:
        action()
    except (Exception, KeyboardInterrupt) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@contextlib.contextmanager
def after_gather(number: int, action: Callable[[], object]) -> Iterator[None]:
    """Do something in the middle of a push: after so many parameters have been gathered."""
    gather, count = push_stream.full_tensor, itertools.count(1)

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        full = gather(tensor)
        if next(count) == number:
            action()
        return full

    with mock.patch.object(push_stream, "full_tensor", gathered):
        yield


def disturbed(model: nn.Module, engine: FakeEngine | None, rank: int) -> dict[str, tuple[list[float], str]]:
    """Pushes during which a weight is changed by rank 1, and pushes that are interrupted."""
    sync = RolloutSync(model, engine)
    weight = model.get_parameter(CHANGED)
    step = torch.optim.AdamW([weight], lr=0.0, fused=True).step

    @torch.no_grad()
    def scale(whole: bool) -> None:
        (weight if whole else weight.to_local()).mul_(1.0)

    changes = {"step": step, "in place": lambda: scale(True), "shard in place": lambda: scale(False)}
    results = {}
    for name, change in changes.items():
        with after_gather(5, change) if rank == 1 else contextlib.nullcontext():
            results["changed: " + name] = ([], outcome(sync.push))
        assert engine is None or engine.calls[-1] == "abort"
    for i in (0, 1):
        with after_gather(5, lambda: os.kill(os.getpid(), signal.SIGINT)) if rank == i else contextlib.nullcontext():
            results[f"rank {i} interrupted"] = ([], outcome(sync.push))
    commit = mock.patch.object(engine, "commit", side_effect=KeyboardInterrupt)
    with commit if engine is not None else contextlib.nullcontext():
        results["commit interrupted"] = ([], outcome(sync.push))
    assert engine is None or engine.calls[-1] == "abort"

    def commits(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return FakeEngine.commit(engine, *args)

    with mock.patch.object(engine, "commit", commits) if engine is not None else contextlib.nullcontext():
        results["interrupted in the commit"] = ([], outcome(sync.push))
    assert engine is None or engine.calls[-1] == "commit"
    results["undisturbed"] = ([], sync.push().fingerprint)
    return results


def failing(number: int, error: Exception, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose call of that number raises; the others do what they did."""
    count = itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            raise error
        return original(*args, **kwargs)

    return fails


OUT_OF_MEMORY = "out of memory"
FAULTS: dict[str, tuple[int, Any, str, int]] = {
    "parts of the amax": (1, push_stream, "shard_amax", 2),
    "room for the largest": (1, torch, "empty", 1),
    "scales": (1, PushStream, "_share_scales", 1),
    "names": (0, PushStream, "specs", 1),
    "quantizing": (0, PushStream, "_quantize", 2),
    "casting": (0, Payload, "merged", 1),
    "digests": (0, PushStream, "digests", 1),
    "stillness": (1, PushStream, "changed", 1),
    "sending": (0, FakeEngine, "load", 1),
    "engine's digests": (0, FakeEngine, "commit", 1),
}
"""Case -> on which rank, in whose function, at which of its calls an ordinary exception is raised."""


def faulty(model: nn.Module, engine: FakeEngine | None, rank: int) -> dict[str, tuple[list[float], str]]:
    """Pushes during which one rank runs out of memory, or is called with what it must refuse."""
    sync = RolloutSync(model, engine)
    results = {}

    def note(name: str, action: Callable[[], object]) -> None:
        if engine is not None:
            engine.calls.clear()
        results[name] = ([], outcome(action))
        assert engine is None or "commit" not in engine.calls, name

    for name, (on, owner, function, number) in FAULTS.items():
        error = (MemoryError if owner is FakeEngine else torch.OutOfMemoryError)(OUT_OF_MEMORY)
        fault = mock.patch.object(owner, function, failing(number, error, getattr(owner, function)))
        with fault if rank == on else contextlib.nullcontext():
            note(name, sync.push)
    note("version of rank 1", lambda: sync.push("x" if rank else None))  # type: ignore[arg-type]
    assert engine is None or engine.calls == []
    results |= two_engines(model, rank)
    results["without a fault"] = ([], sync.push().fingerprint)
    return results


def two_engines(model: nn.Module, rank: int) -> dict[str, tuple[list[float], str]]:
    """Each rank has an engine of its own; that of rank 1 fails after the last tensor, or in the commit."""
    state = state_of(model)
    engine = FakeEngine(state.contract, state.quantized)
    sync = RolloutSync(model, engine)
    sync.push()
    take = engine.load

    def load(tensors: Any) -> None:
        take(tensors)
        raise OSError("connection lost")

    results = {}
    for name in ("load", "commit"):
        fault = mock.patch.object(engine, name, load if name == "load" else mock.Mock(side_effect=OSError("no answer")))
        with fault if rank == 1 else contextlib.nullcontext():
            error = outcome(sync.push)
        results[f"two engines: {name}"] = ([float(engine.version)], error)
    return results


def lost(model: nn.Module, engine: FakeEngine | None, rank: int) -> dict[str, tuple[list[float], str]]:
    """A push in which a gather itself fails on rank 1."""
    gather = push_stream.full_tensor

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1:  # a weight, not what was computed of it
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return gather(tensor)

    with mock.patch.object(push_stream, "full_tensor", gathered) if rank == 1 else contextlib.nullcontext():
        error = outcome(RolloutSync(model, engine).push)
    assert engine is None or engine.calls[-1] == "abort"
    return {"lost": ([], error)}


def data_parallel() -> tuple[list[float], str]:
    """DistributedDataParallel: each rank trains on its half of every batch."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, ALL_LINEARS, schedule=Schedule(start=1, ramp=2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    return train(wrapped, dist.get_rank()), RolloutSync(wrapped, None).payload.fingerprint()


def tensor_parallel() -> str:
    """What happens if one linear of a prepared model is tensor parallel."""
    model = qwen3()
    prepare_qat(model, ALL_LINEARS)
    parallelize_module(model.model.layers[0].self_attn.q_proj, init_device_mesh("cpu", (2,)), ColwiseParallel())
    return outcome(lambda: model(tokens()))


def lora(units: str | None) -> tuple[list[float], str, str]:
    """Losses, fingerprint and a digest of what a push delivers, of LoRA on attention; None: one process."""
    import peft

    torch.manual_seed(3)
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False}
    model: Any = peft.get_peft_model(qwen3(), peft.LoraConfig(**options))
    report = prepare_qat(model)
    if units is not None:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        if units == "wrapper":
            fully_shard(model)
    losses = train(model)
    assert units is None or state_of(model).cache_mode() is CacheMode.NONE, "AUTO keeps nothing under FSDP2"
    engine = FakeEngine(Contract(), report.quantized) if units is None or dist.get_rank() == 0 else None
    fingerprint = RolloutSync(model, engine).push().fingerprint
    delivered = {} if engine is None else engine.serving
    assert not [name for name in delivered if "lora" in name or "base_layer" in name]
    sums = {name: float(tensor.double().sum()) for name, tensor in delivered.items()}
    return losses, fingerprint, repr(sorted(sums.items()))


def scored_before_the_step(sharded: bool) -> str:
    """Fingerprint after backward, a scoring pass, which leaves the root's parameters gathered, and a step."""
    model = qwen3()
    prepare_qat(model, contract_of({"scale": WeightGlobalScale.MOVING_AVERAGE}), scale_decay=0.5)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    follow_optimizer(model, optimizer)
    model(tokens(), labels=tokens()).loss.backward()
    with torch.no_grad():
        model(tokens())
    optimizer.step()
    return RolloutSync(model, None).payload.fingerprint()


def calibrated(sharded: bool) -> str:
    """Fingerprint of what calibration finds; batches that differ between ranks are refused."""
    model = qwen3()
    if sharded:
        shard(model, "layer", MixedPrecisionPolicy())
    batches = [tokens(2, 32), tokens(2, 32, seed=2)]
    if sharded:
        own = [tokens(2, 32, seed=dist.get_rank())]
        refusal = outcome(lambda: calibrate(model, own, ALL_LINEARS))
        assert refusal.startswith("QuadsError: calibrate: the ranks of a sharded model were given different batches")
    return calibrate(model, batches, ALL_LINEARS).fingerprint()


def worker(rank: int, port: int, directory: str) -> None:
    """One rank: every case, then push and export."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    # In a process like those of the ranks: what else has run in pytest's own may change how FP32 sums are ordered.
    results = {ONE_PROCESS + name: reference(case) for name, case in CASES.items()} if rank == 0 else {}
    results[ONE_PROCESS + "ddp"] = reference({"fp32": True, "schedule": Schedule(start=1, ramp=2)})
    results[ONE_PROCESS + "scored"] = ([], scored_before_the_step(False))
    results[ONE_PROCESS + "calibrated"] = ([], calibrated(False))
    adapters = importlib.util.find_spec("peft") is not None
    if adapters:
        results[ONE_PROCESS + "lora"] = lora(None)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))  # instead of a hang
    results["scored"] = ([], scored_before_the_step(True))
    results["calibrated"] = ([], calibrated(True))
    for units in LORA_UNITS if adapters else ():
        results["lora: " + units] = lora(units)
    for name, case in CASES.items():
        model = qwen3(dtype=torch.float32 if case.get("fp32") else torch.bfloat16)
        policy = MixedPrecisionPolicy()
        cache, placement = case.get("cache", "auto"), case.get("placement")
        if case["first"] == "shard":
            shard(model, case["units"], policy, placement, case.get("hybrid", False))
        prepare_qat(model, contract_of(case), cache=cache, schedule=case.get("schedule"))
        if case["first"] != "shard":
            shard(model, case["units"], policy, placement, case.get("hybrid", False))
        stack: Any = model.model.layers[0].mlp.experts.gate_up_proj
        assert stack.placements[-1:] == ((placement or (lambda p: Shard(0)))(stack),)
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
    results |= disturbed(last, engine, rank)
    results |= faulty(last, engine, rank)
    for on in (0, 1):
        fault = failing(3, torch.OutOfMemoryError(OUT_OF_MEMORY), Payload._parameter_items)
        with mock.patch.object(Payload, "_parameter_items", fault) if rank == on else contextlib.nullcontext():
            error = outcome(lambda: export_checkpoint(last, Path(directory) / "exhausted"))
        results[f"export: memory of rank {on}"] = ([], error)
    tokenizer = object() if rank == 0 else None
    refused = outcome(lambda: export_checkpoint(last, Path(directory) / "refused", tokenizer=tokenizer))
    results["export refused"] = ([], refused)
    # A directory that rank 0 cannot write to, and a weight that has diverged, stop every rank's export.
    results["export in the way"] = ([], outcome(lambda: export_checkpoint(last, Path(directory) / "out")))
    results["ddp"], results["tp"] = data_parallel(), ([], tensor_parallel())
    # An engine of another contract stops every rank, instead of leaving one waiting.
    if engine is not None:
        engine._contract = Contract()
    sync = RolloutSync(last, None)
    sync.engine = engine
    results["mismatch"] = ([], outcome(sync.push))
    remove_qat(last)
    last(tokens())
    with torch.no_grad():
        last.model.layers[1].mlp.experts.down_proj.to_local().fill_(torch.nan)
    nan = outcome(lambda: export_checkpoint(last, Path(directory) / "nan", Contract()))
    results["export of nan"] = ([], nan)
    results["mixed"] = ([], mixed_precision())
    # The last that the ranks do together. Rank 1 does not wait, so that rank 0 is the one that is left.
    lone = qwen3()
    prepare_qat(lone)
    shard(lone, "layer", MixedPrecisionPolicy())
    engine = FakeEngine(Contract(), state_of(lone).quantized) if rank == 0 else None
    results |= lost(lone, engine, rank)
    torch.save(results, f"{directory}/rank{rank}.pt")
    os._exit(0)  # there is no group left to take down


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
    assert ranks[0]["mismatch"][1].startswith("MismatchError: trainer and rollout follow different contracts")
    assert ranks[1]["mismatch"][1].startswith("RefitError: the push failed on rank 0: MismatchError")


@pytest.mark.parametrize("change", ["step", "in place", "shard in place"])
def test_weights_that_change_on_a_rank_without_an_engine(ranks: list[dict[str, Any]], change: str) -> None:
    """Each rank looks at its own shards: a change on rank 1 fails the push on both, with the same message that names
    weight and rank; the engine is told to go back, and the next push works."""
    first, second = (r["changed: " + change][1] for r in ranks)
    assert first == second
    assert first.startswith(f"RefitError: {CHANGED}: was changed on rank 1 while the push was under way")
    assert {r["undisturbed"][1] for r in ranks} == {ranks[0]["push"][1]}


def test_an_interrupted_rank_leaves_no_other_waiting(ranks: list[dict[str, Any]]) -> None:
    """Ctrl-C on the rank with the engine, between weights, ends the push on both, as does what else ends the commit; on
    another rank it comes into force after the push, as it does in a commit, which is then known to have happened."""
    for case in ("rank 0 interrupted", "commit interrupted"):
        assert ranks[0][case][1].startswith("KeyboardInterrupt")
        assert ranks[1][case][1].startswith("RefitError: the push failed on rank 0: KeyboardInterrupt")
    assert ranks[0]["interrupted in the commit"][1].startswith("KeyboardInterrupt")
    assert ranks[1]["interrupted in the commit"][1] == "no error"
    assert ranks[0]["rank 1 interrupted"][1] == "no error"
    assert ranks[1]["rank 1 interrupted"][1].startswith("KeyboardInterrupt")


@pytest.mark.parametrize("case", FAULTS)
def test_an_ordinary_exception_on_a_rank_fails_the_push_on_all(ranks: list[dict[str, Any]], case: str) -> None:
    """Memory that runs out on one rank while it measures, quantizes, casts, digests or sends: it raises that, the other
    a RefitError that names rank and cause, nothing is committed, and the next push works."""
    on = FAULTS[case][0]
    own, other = ranks[on][case][1], ranks[1 - on][case][1]
    assert own.startswith(("OutOfMemoryError: ", "RefitError: push of policy version "))
    assert other.startswith(f"RefitError: the push failed on rank {on}: ")
    assert OUT_OF_MEMORY in own
    assert OUT_OF_MEMORY in other
    assert {r["without a fault"][1] for r in ranks} == {ranks[0]["push"][1]}


def test_what_a_rank_without_an_engine_refuses_is_known_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    """A version that is none, on rank 1: both ranks raise, and the engine has heard nothing."""
    refusal = "ContractError: policy_version: is 'x'"
    assert ranks[1]["version of rank 1"][1].startswith(refusal)
    assert ranks[0]["version of rank 1"][1].startswith(f"RefitError: the push failed on rank 1: {refusal}")


def test_engines_of_several_ranks_are_committed_if_all_are_ready(ranks: list[dict[str, Any]]) -> None:
    """An engine on each rank: if one fails before its commit, none commits; if it fails in the commit, which nobody can
    take back elsewhere, both ranks raise and say where the new version serves."""
    assert [r["two engines: load"][0] for r in ranks] == [[1.0], [1.0]]
    assert ranks[0]["two engines: load"][1] == "RefitError: the push failed on rank 1: OSError: connection lost"
    assert "connection lost" in ranks[1]["two engines: load"][1]
    assert [r["two engines: commit"][0] for r in ranks] == [[2.0], [1.0]]
    for rank in ranks:
        assert "no answer" in rank["two engines: commit"][1]
        assert rank["two engines: commit"][1].endswith("policy version 2 was committed and serves on rank 0")


def test_a_collective_that_fails_is_called_by_its_name(ranks: list[dict[str, Any]]) -> None:
    """A rank that cannot take part in a gather raises at once and says that its process has to end; once it has, the
    other raises likewise, and its engine has given the push up."""
    for rank, cause in zip(ranks, ("RuntimeError: ", f"OutOfMemoryError: {OUT_OF_MEMORY}"), strict=True):
        assert rank["lost"][1].startswith("CollectiveError: model.embed_tokens.weight: could not be gathered")
        assert cause in rank["lost"][1]
        assert "end this process" in rank["lost"][1]


def test_a_failed_export_stops_every_rank(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """Rank 0 refuses its arguments, or its writer fails before anything is gathered, one rank runs out of memory, or a
    NaN turns up on the way: all raise, none hangs."""
    assert ranks[0]["export refused"][1].startswith("ContractError: tokenizer")
    assert "failed on rank 0: ContractError: tokenizer" in ranks[1]["export refused"][1]
    for on in (0, 1):
        assert ranks[on][f"export: memory of rank {on}"][1] == f"OutOfMemoryError: {OUT_OF_MEMORY}"
        other = ranks[1 - on][f"export: memory of rank {on}"][1]
        assert f"failed on rank {on}: OutOfMemoryError: {OUT_OF_MEMORY}" in other
    assert ranks[0]["export in the way"][1].startswith("CheckpointError: ")
    assert "failed on rank 0: CheckpointError: " in ranks[1]["export in the way"][1]
    for rank in ranks:
        assert rank["export of nan"][1].startswith("FormatError: model.layers.1.mlp.experts")


def test_data_parallel_training(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """DistributedDataParallel on two ranks: replicas keep the same bytes, and train like one process on both rows."""
    losses, _ = ranks[0][ONE_PROCESS + "ddp"]
    assert ranks[0]["ddp"][1] == ranks[1]["ddp"][1]
    average = [(a + b) / 2 for a, b in zip(ranks[0]["ddp"][0], ranks[1]["ddp"][0], strict=True)]
    assert average == pytest.approx(losses, rel=1e-3)
    assert average[0] > average[-1]


def test_parameters_that_fsdp_kept_gathered_are_not_sent(ranks: list[dict[str, Any]]) -> None:
    """A scoring pass between backward and step leaves gathered parameters behind, and the step is not in them."""
    assert {r["scored"][1] for r in ranks} == {ranks[0][ONE_PROCESS + "scored"][1]}


def test_calibration_gathers_sharded_weights(ranks: list[dict[str, Any]]) -> None:
    """calibrate() of a sharded model finds what one process finds, on every rank; different batches are refused."""
    assert {r["calibrated"][1] for r in ranks} == {ranks[0][ONE_PROCESS + "calibrated"][1]}


@pytest.mark.parametrize("units", LORA_UNITS)
def test_lora_trains_and_travels_sharded(ranks: list[dict[str, Any]], units: str) -> None:
    """LoRA under FSDP2: losses of one process, and the rollout gets base + update, though one rank has no engine."""
    pytest.importorskip("peft", reason="needs peft")
    assert ranks[0]["lora: " + units] == ranks[0][ONE_PROCESS + "lora"]
    assert ranks[1]["lora: " + units][:2] == ranks[0]["lora: " + units][:2]


def test_mixed_precision_quantizes_the_master(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """FP32 masters gathered as BF16 quantize to what a push of the masters sends."""
    assert {r["mixed"][1] for r in ranks} == {"equal"}


def test_tensor_parallel_weights_are_refused(ranks: list[dict[str, tuple[list[float], str]]]) -> None:
    """A shard that reaches the forward pass has not the amax of its tensor: named, and what to do instead."""
    for rank in ranks:
        assert "self_attn.q_proj: reaches the forward pass as a shard" in rank["tp"][1]
        assert rank["tp"][1].startswith("ContractError")
        assert "shard the model with FSDP2" in rank["tp"][1]
