# SPDX-License-Identifier: Apache-2.0
"""Two processes, each with one rank of a tensor-parallel engine (vLLM's external launcher) and of a trainer."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import start_engine
from plugin_helpers import PROMPTS, decoded
from serving_helpers import trainer
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn

pytest.importorskip("vllm")

from vllm_quads.refit.report import KEEP_SERVING, REFUSES

PROMPT = PROMPTS[1]


def local(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of every parameter."""
    return [p.data.to_local() if hasattr(p, "to_local") else p.data for p in model.parameters()]


@torch.no_grad()
def change(model: nn.Module, factor: float = 1.3) -> None:
    """A step that changes every matrix, each column by another factor, whatever this rank's rows of it are."""
    for part in local(model):
        if part.dim() > 1:
            part.mul_(torch.linspace(1, factor, part.shape[-1]).to(part.dtype))


def outcome(action: Callable[[], Any]) -> str:
    """The error of an action, as text."""
    try:
        action()
    except (Exception, KeyboardInterrupt) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def before(owner: Any, name: str, number: int, action: Callable[[], Any]) -> Any:
    """Do something before the call of that number of a function."""
    function, count = getattr(owner, name), itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            action()
        return function(*args, **kwargs)

    return mock.patch.object(owner, name, called)


def interrupt() -> None:
    """Ctrl-C, as it reaches this process alone."""
    signal.raise_signal(signal.SIGINT)


def run_out_of_memory() -> None:
    """Raise what torch raises."""
    raise torch.OutOfMemoryError("out of memory")


@contextlib.contextmanager
def damage(name: str) -> Iterator[None]:
    """A trainer that sends NaN in the tensor of this name."""
    from trainer_qat.push_stream import PushStream

    intact = PushStream.tensors

    def damaged(stream: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for sent, tensor in intact(stream):
            yield sent, tensor.clone().fill_(torch.nan) if sent == name else tensor

    with mock.patch.object(PushStream, "tensors", damaged):
        yield


@contextlib.contextmanager
def flip(name: str) -> Iterator[None]:
    """A bit of the tensor of this name flips on its way to the engine."""
    from vllm_quads.plugin.engine import VllmEngine
    from vllm_quads.refit import Lasting

    load = VllmEngine.load

    def flipped(engine: Any, tensors: Any) -> None:
        def sent() -> Iterator[tuple[str, torch.Tensor]]:
            for sent, tensor in tensors:
                yield sent, one_bit(tensor.clone()) if sent == name else tensor

        load(engine, Lasting(sent()))

    with mock.patch.object(VllmEngine, "load", flipped):
        yield


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with the last bit of its first element flipped."""
    tensor.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
    return tensor


NORM, ROUTER = "model.norm.weight", "model.layers.1.mlp.gate.weight"


INTERRUPTS = {
    "interrupted while it gathers": (1, "trainer_qat.push_stream:PushStream", "_gather", 3),
    "interrupted in the first vote": (0, "vllm_quads.plugin.launched", "_vote", 1),
    "interrupted in the second vote": (1, "vllm_quads.plugin.launched", "_vote", 2),
    "interrupted after the commit": (0, "trainer_qat.push:Push", "_settle", 1),
}
"""Case -> on which rank, before which call of whose function, Ctrl-C is pressed."""

FIRST, LATER = (f"model.layers.{layer}.mlp.experts.gate_up_proj.weight_scale_2" for layer in (0, 1))


def worker(rank: int, port: int, checkpoint: str, directory: str) -> None:
    """One rank; what it saw, under the name of each case."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # instead of a hang
    from torch.distributed.fsdp import fully_shard

    from trainer_qat import RolloutSync, push_stream
    from trainer_qat.prepare import quantizers_of
    from trainer_qat.push_stream import PushStream
    from vllm_quads.nvfp4 import MismatchError, RefitError
    from vllm_quads.plugin.refit import RefitSession
    from vllm_quads.plugin.serving import LlmEngine
    from vllm_quads.refit import as_engine

    llm = start_engine(checkpoint, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    model = trainer(Path(checkpoint))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    gathers = len(list(quantizers_of(model))) + 3  # of the amax of every quantized weight, then of weights
    sync, engine = RolloutSync(model, llm), as_engine(llm)
    seen: dict[str, dict[str, Any]] = {}

    def note(name: str, **more: Any) -> None:
        seen[name] = {
            "fingerprint": engine.fingerprint(), "version": engine.policy_version(), "scores": decoded(llm, PROMPT),
            **more,
        }  # fmt: skip

    note("own load", trainer=sync.payload.fingerprint())
    first = [w.clone() for w in local(model)]
    change(model)
    note("packed", report=sync.push().fingerprint, trainer=sync.payload.fingerprint())
    note("bf16", report=sync.push(packed=False).fingerprint)
    for weight, old in zip(local(model), first, strict=True):
        weight.copy_(old)
    note("again", report=sync.push().fingerprint)

    change(model)
    with damage(LATER) if rank == 1 else contextlib.nullcontext():
        note("damaged", error=outcome(sync.push))
    elsewhere = mock.patch.object(sync, "_check", side_effect=MismatchError("another contract"))
    with elsewhere if rank == 1 else contextlib.nullcontext():
        note("declined", error=outcome(sync.push))
    with flip(NORM) if rank == 0 else contextlib.nullcontext():
        note("flipped", error=outcome(sync.push))
    note("versions", error=outcome(lambda: sync.push(20 + rank)))
    moved = mock.patch.object(PushStream, "check_unchanged", side_effect=RefitError("was changed"))
    with moved if rank == 0 else contextlib.nullcontext():
        note("changed", error=outcome(sync.push))
    exhausted = before(PushStream, "_quantize", 2, run_out_of_memory)
    with exhausted if rank == 1 else contextlib.nullcontext():
        note("memory", error=outcome(sync.push))
    with damage(FIRST) if rank == 0 else contextlib.nullcontext():
        error = outcome(lambda: sync.push(rollback="none"))
    state, says = engine.status().state.value, outcome(lambda: decoded(llm, [3]))
    seen["refusing"] = {"error": error, "state": state, "says": says}
    note("recovered", report=sync.push().fingerprint)
    for case, (on, owner, name, number) in INTERRUPTS.items():
        with before(resolve_name(owner), name, number, interrupt) if rank == on else contextlib.nullcontext():
            note(case, error=outcome(sync.push))

    late = mock.patch.object(RefitSession, "_committed", side_effect=RefitError("no room for the report"))
    with late if rank == 1 else contextlib.nullcontext():
        error = outcome(sync.push)
    state, says = engine.status().state.value, outcome(lambda: decoded(llm, [3]))
    seen["divided"] = {"error": error, "state": state, "says": says}
    note("united", report=sync.push().fingerprint)

    whole = trainer(Path(checkpoint))
    sharded, sync = sync, RolloutSync(whole, llm)
    note("whole", report=sync.push().fingerprint)
    workers = RolloutSync(whole, LlmEngine(llm))  # the calls that workers of a server get
    with late if rank == 1 else contextlib.nullcontext():
        error = outcome(workers.push)
    state, says = engine.status().state.value, outcome(lambda: decoded(llm, [3]))
    seen["workers divided"] = {"error": error, "state": state, "says": says}
    note("workers united", report=workers.push().fingerprint)
    router = whole.model.layers[1].mlp.gate.weight.data
    if rank == 1:
        one_bit(router)
    note("router", error=outcome(sync.push), fitted=outcome(lambda: sync.push(packed=False)))
    if rank == 1:
        one_bit(router)  # as it was
        change(whole)
    note("different", error=outcome(sync.push))
    dist.barrier()
    # The last that the ranks do together. Rank 1 does not wait, so that rank 0 is the one that is left.
    with before(push_stream, "full_tensor", gathers, run_out_of_memory) if rank == 1 else contextlib.nullcontext():
        error = outcome(sharded.push)
    seen["lost"] = {"error": error, "state": engine.status().state.value, "version": engine.policy_version()}
    torch.save(seen, f"{directory}/rank{rank}.pt")
    os._exit(0)  # groups of vLLM and of the trainer are not taken down in step


def remove_leftovers() -> None:
    """vLLM's CPU engine cannot start if a launched one before it was killed: its shared memory always has one name."""
    for file in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
        file.unlink()


@pytest.fixture(scope="module")
def ranks(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    directory = tmp_path_factory.mktemp("launched")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    checkpoint = make_tiny("qwen3_moe", moe_intermediate_size=64)  # whose halves are whole blocks
    remove_leftovers()
    try:
        mp.start_processes(worker, args=(port, str(checkpoint), str(directory)), nprocs=2, start_method="spawn")
    finally:
        remove_leftovers()
    return [torch.load(directory / f"rank{r}.pt") for r in range(2)]


SERVES = ("fingerprint", "version", "scores")


def test_sharded_trainer_pushes_in_process(ranks: list[dict[str, Any]]) -> None:
    """An FSDP2 trainer pushes into the engine whose ranks live in its own processes: packed and BF16 give both ranks
    together the fingerprint of whole tensors, and the first weights pushed again give the log-probs of the engine's own
    load, bit for bit."""
    mine, other = ranks
    assert mine["own load"]["trainer"] == mine["own load"]["fingerprint"] != mine["packed"]["fingerprint"]
    assert mine["packed"]["trainer"] == mine["packed"]["report"] == mine["packed"]["fingerprint"]
    assert mine["bf16"]["report"] == mine["bf16"]["fingerprint"] == mine["packed"]["fingerprint"]
    assert mine["bf16"]["scores"] == mine["packed"]["scores"] != mine["own load"]["scores"]
    assert mine["again"]["fingerprint"] == mine["own load"]["fingerprint"]
    assert mine["again"]["scores"] == mine["own load"]["scores"]
    assert [mine[case]["version"] for case in ("own load", "packed", "bf16", "again")] == [0, 1, 2, 3]
    for case in ("own load", "packed", "bf16", "again"):
        assert mine[case] == other[case]


@pytest.mark.parametrize(
    ("case", "failed", "own", "others"),
    [
        ("damaged", 1, rf"RefitError: {LATER}: .*{KEEP_SERVING}", rf"failed on rank 1: .*{LATER}.*{KEEP_SERVING}"),
        ("declined", 1, "MismatchError: another contract", "failed on rank 1: MismatchError: another contract"),
        ("flipped", 0, rf"Error: {NORM}: arrived with other bytes.*{KEEP_SERVING}", rf"failed on rank 0: .*{NORM}"),
        ("versions", 0, "version and rollback .20, .host.. on rank 0, .21, ", r"version and rollback .20, .host"),
        ("changed", 0, "RefitError: was changed", rf"failed on rank 0: .*{KEEP_SERVING}"),
        ("memory", 1, rf"MemoryError: out of .*{KEEP_SERVING}", rf"failed on rank 1: .*MemoryError.*{KEEP_SERVING}"),
    ],
)
def test_a_failure_on_one_rank_ends_the_push_on_all(
    ranks: list[dict[str, Any]], case: str, failed: int, own: str, others: str
) -> None:
    """A tensor damaged on the way to one rank (also by one bit, in one that is not quantized), a trainer that finds a
    mismatch on one rank, different versions, weights that change under way, memory that runs out on one rank: every
    rank raises and says where, none hangs, and the previous weights serve on both."""
    for rank in ranks:
        assert {key: rank[case][key] for key in SERVES} == {key: rank["again"][key] for key in SERVES}
    assert re.search(own, ranks[failed][case]["error"])
    assert re.search(others, ranks[1 - failed][case]["error"])


def test_an_interrupt_of_one_rank_waits_for_the_end_of_the_push(ranks: list[dict[str, Any]]) -> None:
    """Ctrl-C on one rank, wherever the push is, waits for votes and commit, in which the other rank needs this one: the
    new version serves on both, then the interrupt takes effect."""
    version = ranks[0]["recovered"]["version"]
    for case, (on, *_) in INTERRUPTS.items():
        version += 1
        assert ranks[on][case]["error"].startswith("KeyboardInterrupt")
        assert ranks[1 - on][case]["error"] == "no error"
        for rank in ranks:
            assert rank[case]["version"] == version
            assert rank[case]["fingerprint"] == rank["recovered"]["fingerprint"]


def test_a_rank_that_has_lost_the_others_votes_on_nothing(ranks: list[dict[str, Any]]) -> None:
    """A gather that fails on one rank of the trainer, which the others cannot be told: its engine goes back at once,
    and so does that of the other rank when the process of the first has ended."""
    for rank, cause in zip(ranks, ("RuntimeError", "OutOfMemoryError: out of memory"), strict=True):
        assert "could not be gathered on this rank" in rank["lost"]["error"]
        assert cause in rank["lost"]["error"]
        assert rank["lost"]["error"].endswith(KEEP_SERVING)
        assert (rank["lost"]["state"], rank["lost"]["version"]) == ("serving", rank["different"]["version"])


def test_ranks_refuse_together(ranks: list[dict[str, Any]]) -> None:
    """Without a rollback, the rank that was refused before it wrote anything refuses to serve like the one that wrote,
    and says so; a complete push brings both back."""
    for rank in ranks:
        assert rank["refusing"]["state"] == "refusing"
        assert REFUSES in rank["refusing"]["error"]
        assert KEEP_SERVING not in rank["refusing"]["error"]
        assert rank["refusing"]["says"].startswith("RefitError: this engine cannot serve")
        assert rank["recovered"]["report"] == rank["recovered"]["fingerprint"] == rank["packed"]["fingerprint"]
        assert rank["recovered"]["scores"] == rank["packed"]["scores"]


def test_ranks_commit_together(ranks: list[dict[str, Any]]) -> None:
    """One rank fails in the commit itself, when the others have committed: none waits for another, all raise, name the
    rank and refuse, and the next push brings all back. Workers that are refitted by vLLM's calls do likewise."""
    for rank, case in itertools.product(ranks, ("divided", "workers divided")):
        assert re.search(r"RefitError: .*rank 1 could not commit.*no room", rank[case]["error"])
        assert "refuses to serve until" in rank[case]["error"]
        assert KEEP_SERVING not in rank[case]["error"]
        assert rank[case]["state"] == "refusing"
        assert rank[case]["says"].startswith("RefitError: this engine cannot serve")
    for rank in ranks:
        united = rank["workers united"]
        assert united["report"] == united["fingerprint"] == rank["whole"]["fingerprint"]
        assert (united["scores"], united["version"]) == (rank["whole"]["scores"], rank["whole"]["version"] + 2)
        assert rank["united"]["report"] == rank["united"]["fingerprint"] == rank["recovered"]["fingerprint"]
        assert rank["united"]["scores"] == rank["recovered"]["scores"]
    assert ranks[0]["united"] == ranks[1]["united"]


def test_replicas_of_a_trainer_have_to_agree(ranks: list[dict[str, Any]]) -> None:
    """A trainer that is whole on each rank pushes likewise; replicas that have drifted apart are refused, although the
    shard of one of them would fit: by the fingerprint, and by name where only weights differ that are not quantized."""
    for rank in ranks:
        assert rank["whole"]["fingerprint"] == rank["own load"]["fingerprint"]
        assert re.search("fingerprint .* on rank 0, .* on rank 1; push one policy", rank["different"]["error"])
        for error in (rank["router"]["error"], rank["router"]["fitted"]):
            assert re.search(rf"{ROUTER} has digest .* on rank 0, .* on rank 1; push one.*{KEEP_SERVING}", error)
        assert {key: rank["router"][key] for key in SERVES} == {key: rank["workers united"][key] for key in SERVES}
        assert {key: rank["different"][key] for key in SERVES} == {key: rank["workers united"][key] for key in SERVES}
