# SPDX-License-Identifier: Apache-2.0
"""Case `launcher` of `refit_two_gpus`: two processes, each with one rank of a trainer and one of a parallel engine.

The engine is vLLM's with `distributed_executor_backend="external_launcher"`. First the FSDP2 trainer pushes in process,
on both ranks. Then the processes follow a third one, a trainer that is whole, which pushes into the same engine over
NCCL through vLLM's weight-transfer calls (`inline` on a CPU, to try the script). Ranks that find fewer GPUs than ranks
share one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import refit_two_gpus as common
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from trainer_qat import RolloutSync
from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit import as_engine

_KEY = b"quads"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]}


def run(arguments: argparse.Namespace, write: Callable[[Mapping[str, Any]], None]) -> None:
    """One of torchrun's processes; rank 0 hands the results of each part to `write`."""
    layers, small = arguments.layers, arguments.small
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if gpus:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    with Listener(("127.0.0.1", 0), authkey=_KEY) as listener, tempfile.TemporaryDirectory() as temporary:
        trainer = None
        addresses = gathered(listener.address)
        if rank == 0:
            trainer = mp.get_context("spawn").Process(target=follow_me, args=(addresses, layers, small), daemon=True)
            trainer.start()  # imports while the engine starts
            common.prepare(Path(temporary), layers, small)
        directory = gathered(temporary)[0]
        llm = start(directory, ranks, arguments.expert_parallel, arguments.graphs)
        common.say(f"rank {rank}: engine started")
        model = common.build(layers, device, shard=True, small=small)
        engine: Any = as_engine(llm)

        def answers() -> list[list[float]]:
            """Of this rank, after asking the other for its own."""
            mine = scores(llm)
            assert all(other == mine for other in gathered(mine)), "the ranks answer differently"
            return mine

        gathered(None)
        results = common.measure(model, engine, answers)
        whole = RolloutSync(model, None).payload.fingerprint()
        assert engine.fingerprint() == whole == results["A again"]["fingerprint"]
        common.say(f"rank {rank}: FSDP2 pushes done")
        if rank == 0:
            write({"FSDP2 trainer, in process": results})
        del model
        with listener.accept() as connection:
            over_nccl = obey(connection, llm)
        if rank == 0:
            assert trainer is not None
            trainer.join(60)
            # The same seed: the trainer that is whole has the bytes of the one in two parts.
            assert over_nccl["A"]["fingerprint"] == whole
            write({"one trainer process, nccl" if gpus else "one trainer process, inline": over_nccl})
        gathered(None)
    common.say(f"rank {rank}: done")


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start(directory: str, ranks: int, expert_parallel: bool, graphs: bool) -> Any:
    """This rank of an engine with dummy weights."""
    from vllm import LLM

    return LLM(
        directory, quantization="quads", load_format="dummy", skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, disable_custom_all_reduce=True,
        tensor_parallel_size=ranks, enable_expert_parallel=expert_parallel,
        distributed_executor_backend="external_launcher", max_model_len=1024, max_num_seqs=16,
        max_num_batched_tokens=1024, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28,
        enforce_eager=not graphs, **({"compilation_config": GRAPHS} if graphs else {}),
    )  # fmt: skip


def scores(llm: Any) -> list[list[float]]:
    """Greedy tokens and their log-probs, one prompt after another."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    out = []
    for prompt in common.PROMPTS:
        (request,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        completion = request.outputs[0]
        values = [next(iter(entry.values())).logprob for entry in completion.logprobs]
        out.append([*map(float, completion.token_ids), *values])
    return out


# -- a trainer in a process of its own ---------------------------------------------------------------------------------


def obey(connection: Connection, llm: Any) -> Any:
    """Do what the other process says, until it sends its results."""
    from vllm_quads.plugin.serving import LlmControl

    control = LlmControl(llm)
    while True:
        method, arguments = connection.recv()
        if method == "results":
            return arguments
        try:
            result = scores(llm) if method == "scores" else getattr(control, method)(*arguments)
            connection.send((True, result))
        except Exception as e:
            connection.send((False, f"{type(e).__name__}: {e}"))


class RanksControl:
    """`vllm_quads.refit.transport.Control` of an engine whose ranks `obey`."""

    label = "two processes"
    can_pause = False

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, which have to be working on it at the same time."""
        for connection in self._connections:
            connection.send((method, arguments))
        answers = [connection.recv() for connection in self._connections]
        failed = next((text for ok, text in answers if not ok), None)
        if failed is not None:
            raise RefitError(f"{self.label}: {method} failed: {failed}")
        return [result for _, result in answers]

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """One result of each rank's only worker."""
        return [results[0] for results in self.call("rpc", method, *arguments)]

    def init(self, info: Mapping[str, Any]) -> None:
        self.call("init", dict(info))

    def start(self) -> None:
        self.call("start")

    def update(self, info: Mapping[str, Any]) -> None:
        self.call("update", dict(info))

    def finish(self) -> None:
        self.call("finish")

    def set_weight_version(self, version: str) -> None:
        self.call("set_weight_version", version)

    def pause(self, mode: str) -> None:
        """Nothing runs between its calls."""

    def resume(self) -> None:
        """Nothing was paused."""

    def is_paused(self) -> bool:
        return False

    def require_idle(self) -> None:
        self.call("require_idle")

    def reset_prefix_cache(self, running: bool) -> bool:
        return all(self.call("reset_prefix_cache", running))

    def sleep(self, level: int) -> None:
        self.call("sleep", level)

    def wake_up(self, tags: list[str] | None) -> None:
        self.call("wake_up", tags)


def follow_me(addresses: Sequence[Any], layers: int, small: bool) -> None:
    """The third process: a trainer that is whole, on the first GPU."""
    from vllm_quads.plugin.transfer_send import NcclPlane
    from vllm_quads.refit.planes import InlinePlane
    from vllm_quads.refit.remote import RemoteEngine

    gpu = torch.cuda.is_available()
    model = common.build(layers, torch.device("cuda", 0) if gpu else torch.device("cpu"), shard=False, small=small)
    common.say("the trainer is ready")
    connections = [Client(address, authkey=_KEY) for address in addresses]
    control = RanksControl(connections)
    plane: Any = NcclPlane(lambda: len(addresses), address="127.0.0.1") if gpu else InlinePlane()

    def answers() -> list[list[float]]:
        first, *others = control.call("scores")
        assert all(other == first for other in others), "the ranks answer differently"
        return list(first)

    results = common.measure(model, RemoteEngine(control, plane), answers)
    for connection in connections:
        connection.send(("results", results))
    common.say("the trainer is done")


__all__ = ["run"]
