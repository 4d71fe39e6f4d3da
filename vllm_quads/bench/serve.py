# SPDX-License-Identifier: Apache-2.0
"""`quads bench serve`: output tokens per second of whole vLLM engines, QUADS beside BF16, FP8 block and Marlin NVFP4.

Each engine runs in a process of its own, one after the other on the same card; with `together` they start side by side
and generate in turn. All get the same prompts, sampling, CUDA-graph sizes and limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from vllm_quads.bench import environment
from vllm_quads.bench.engines import (
    BASELINE,
    DEFAULT_ENGINES,
    Engine,
    engine_named,
    groups_that_fit,
    kv_bytes_per_token,
    write_model,
)
from vllm_quads.bench.result import Result, Series
from vllm_quads.nvfp4.errors import QuadsError

ROUTINGS = {
    "uniform": "every token to random experts (VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random)",
    "model": "the model's own router on its own activations",
}
WEIGHTS = {"dummy": "vLLM's dummy loader", "random": "N(0, 0.02²), generated while loading"}
UTILIZATION = 0.9
_BESIDE_GIB = 6.0
"""Room for activations, CUDA graphs, and what loading needs for a while, of each engine."""
INTERRUPTED = "the rest"
WORKER = ("-m", "vllm_quads.bench.serve_worker")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ServeOptions:
    """What is run."""

    engines: tuple[str, ...] = DEFAULT_ENGINES
    sequences: tuple[int, ...] = (16, 64, 256)
    prompt: int = 64
    output: int = 256
    layers: int = 48
    routing: str = "uniform"
    weights: str | None = None
    """`dummy` or `random`; None: dummy under uniform routing, random under the model's own."""
    repeats: int = 3
    together: bool = False
    kv_gib: float = 10.0
    """KV cache of each engine where they are on the card together."""
    compile: bool = True
    """vLLM's torch.compile; without it engines start a minute earlier, and decode in CUDA graphs all the same."""
    timeout: float = 900.0
    """Seconds that an engine may take to start, or to answer."""
    logs: Path | None = None
    """Folder that keeps the engines' logs."""
    count_experts: bool = False
    """Also start one engine that counts how many experts a decode step uses."""

    def __post_init__(self) -> None:
        for name in self.engines:
            engine_named(name)
        if not self.engines or len(set(self.engines)) < len(self.engines):
            raise QuadsError("--engines: expected at least one, each once")
        if not self.sequences or min(self.sequences) < 1:
            raise QuadsError("--sequences: expected numbers of sequences, each 1 or more")
        for option in ("prompt", "output", "layers", "repeats", "timeout"):
            if getattr(self, option) < 1:
                raise QuadsError(f"--{option}: is {getattr(self, option)}, expected 1 or more")
        if self.routing not in ROUTINGS:
            raise QuadsError(f"--routing: is {self.routing!r}, expected one of {', '.join(ROUTINGS)}")
        if self.weights is not None and self.weights not in WEIGHTS:
            raise QuadsError(f"--weights: is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")
        if self.routing == "model" and self.weights == "dummy":
            raise QuadsError(
                "--weights dummy with --routing model: vLLM's dummy weights leave the router nothing to decide on; "
                "use --weights random"
            )

    @property
    def load(self) -> str:
        """Which weights are loaded."""
        return self.weights or ("random" if self.routing == "model" else "dummy")


def engine_options(options: ServeOptions) -> dict[str, Any]:
    """Arguments of vllm.LLM that are the same for every engine."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted(options.sequences)}
    if not options.compile:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    common: dict[str, Any] = {
        "max_model_len": options.prompt + options.output + 64,
        "max_num_seqs": max(options.sequences),
        "compilation_config": graphs,
    }
    if options.together:  # vLLM would divide a card that it believes to have for itself
        return common | {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(options.kv_gib * 2**30)}
    return common | {"gpu_memory_utilization": UTILIZATION}


def run_serve(options: ServeOptions | None = None, progress: Progress = lambda *_: None) -> Result:
    """Measure. Raises MissingEnvironment where there is no Hopper GPU or no vLLM; QuadsError if no engine ran."""
    options = options or ServeOptions()
    quads = any(name.startswith("quads") for name in options.engines)
    environment.require(hopper=quads)
    run = _Run(options, progress)
    with tempfile.TemporaryDirectory() as directory:
        try:
            for i, group in enumerate(_groups(options)):
                run.measure(group, Path(directory), count_experts=options.count_experts and i == 0)
        except KeyboardInterrupt:  # what took minutes to measure must not be lost
            if not any(run.seconds.values()):
                raise
            run.missing[INTERRUPTED] = "interrupted"
    return run.result()


def _groups(options: ServeOptions) -> list[list[str]]:
    if not options.together:
        return [[name] for name in options.engines]
    card = torch.cuda.get_device_properties(0).total_memory / 2**30
    return groups_that_fit(options.engines, options.layers, options.kv_gib + _BESIDE_GIB, UTILIZATION * card)


class _Run:
    def __init__(self, options: ServeOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.seconds: dict[str, dict[int, list[float]]] = {name: {} for name in options.engines}
        self.details: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.experts_hit: dict[str, float] = {}
        per_engine = 1 + len(options.sequences) * (options.repeats + 1)
        self.done, self.total = 0, per_engine * len(options.engines)

    def measure(self, names: Sequence[str], directory: Path, *, count_experts: bool) -> None:
        """Start these engines, let them generate in turn, stop them.

        With `count_experts` one of them (QUADS if it is there) is started a second time, counts, and is stopped before
        anything is timed.
        """
        with contextlib.ExitStack() as stack:
            workers = {}
            counting = stack.enter_context(contextlib.ExitStack())
            if count_experts:
                engine = engine_named(next((n for n in names if n.startswith("quads")), names[0]))
                extra = {"enable_return_routed_experts": True, "enforce_eager": True}
                engine = replace(engine, name=f"{engine.name}-counting", arguments=engine.arguments | extra)
                counter = counting.enter_context(_worker(engine, self.options, directory))
                if not self.options.together:  # not beside engines that take the rest of the card
                    self._count(counter)
                    counting.close()
            for name in names:
                self.progress(self.done, self.total, f"starting {name}")
                workers[name] = stack.enter_context(_worker(engine_named(name), self.options, directory))
            for name in list(workers):
                if self._guarded(workers, name, self._started):
                    self._step(f"{name} is up")
            if count_experts and self.options.together:
                self._count(counter)
            counting.close()
            for repeat in range(self.options.repeats + 1):  # the first, with few tokens, warms up
                for count in self.options.sequences:
                    for name in list(workers):
                        self._guarded(workers, name, partial(self._generate, count=count, repeat=repeat))
                        self._step(f"{name}, {count} sequences")
            for name in list(workers):
                self._guarded(workers, name, self._memory)

    def _count(self, worker: Worker) -> None:
        """Distinct experts per layer and decode step, from an engine that returns its routing (slower, not timed)."""
        o = self.options
        try:
            worker.receive()
            for count in o.sequences:
                command = {"event": "experts", "sequences": count, "prompt": o.prompt, "output": min(o.output, 64)}
                worker.send(command)
                self.experts_hit[str(count)] = round(worker.receive()["hit"], 2)
        except WorkerFailed as e:
            self.missing["experts hit"] = str(e)

    def _step(self, what: str) -> None:
        self.done += 1
        self.progress(self.done, self.total, what)

    def _guarded(self, workers: dict[str, Worker], name: str, action: Callable[[Worker], None]) -> bool:
        try:
            action(workers[name])
            return True
        except WorkerFailed as e:  # what the others measure must not be lost
            self.missing[name] = str(e)
            workers.pop(name).process.kill()
            return False

    def _started(self, worker: Worker) -> None:
        ready = worker.receive()
        self.details[worker.engine.label] = {"name": worker.engine.name, "start_s": ready["start_s"]}

    def _generate(self, worker: Worker, count: int, repeat: int) -> None:
        o = self.options
        output = min(16, o.output) if repeat == 0 else o.output
        worker.send({"sequences": count, "prompt": o.prompt, "output": output})
        seconds = worker.receive()["seconds"]
        if repeat:
            self.seconds[worker.engine.name].setdefault(count, []).append(seconds)

    def _memory(self, worker: Worker) -> None:
        worker.send({"event": "memory"})
        found = worker.receive()
        found.pop("event")
        details = self.details[worker.engine.label]
        details |= kv_left(found, kv_bytes_per_token(self.options.layers))
        details["kernels"] = worker.kernels()

    def result(self) -> Result:
        o = self.options
        if not any(self.seconds.values()):
            raise QuadsError("no engine ran: " + "; ".join(f"{n}: {why}" for n, why in self.missing.items()))
        series = []
        for name in o.engines:
            engine, runs = engine_named(name), self.seconds[name]
            if not runs:
                continue
            best = {n: n * o.output / min(times) for n, times in runs.items()}
            series.append(Series(engine.label, "quads" if name.startswith("quads") else "peer", "tokens/s", best))
            self.details[engine.label]["tokens_per_s_of_every_run"] = {
                str(n): [round(n * o.output / t, 1) for t in times] for n, times in runs.items()
            }
        settings: dict[str, Any] = {
            "name": f"qwen3-30b-a3b-{o.layers}-layers-{o.routing}{'' if o.compile else '-no-compile'}",
            "model": "Qwen3-30B-A3B architecture",
            "layers": o.layers,
            "prompt": o.prompt,
            "output": o.output,
            "routing": f"{o.routing}: {ROUTINGS[o.routing]}",
            "weights": f"{o.load}: {WEIGHTS[o.load]}",
            "temperature": 1.0,
            "torch_compile": o.compile,
            "best_of": o.repeats,
            "order": "as many engines as fit on the card side by side, generating in turn"
            if o.together
            else "one engine after the other",
            "options": engine_options(o),
            "baseline": engine_named(BASELINE).label,
        }
        if self.experts_hit:
            settings["experts_hit"] = self.experts_hit
        return Result(
            "serve",
            f"Whole engine, Qwen3-30B-A3B, {o.layers} layers, {o.prompt} in / {o.output} out, {o.routing} routing"
            + ("" if o.compile else ", no torch.compile"),
            "sequences",
            tuple(series),
            environment.describe(),
            settings,
            details=self.details,
            missing=self.missing,
        )


def kv_left(found: dict[str, Any], bytes_per_token: int) -> dict[str, Any]:
    """What a card would have left for the KV cache, in GiB and tokens.

    `utilization` of the card, minus the most that the process has reserved beside its KV cache: weights, activations,
    CUDA graphs. The CUDA context, about 0.5 GiB, comes on top for every engine alike.
    """
    details = {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}
    if "kv_cache_tokens" in found and "reserved_gib" in found:
        cache = found["kv_cache_tokens"] * bytes_per_token / 2**30
        other = found["reserved_gib"] - cache
        left = UTILIZATION * found["card_gib"] - other
        details |= {
            "kv_cache_gib": round(cache, 2),
            "beside_kv_cache_gib": round(other, 2),
            "kv_left_gib": round(left, 2),
            "kv_left_tokens": int(left * 2**30 / bytes_per_token),
        }
    return details


class WorkerFailed(QuadsError):
    """An engine did not start, or died."""


@dataclass
class Worker:
    """The parent's end of one engine's process."""

    engine: Engine
    process: subprocess.Popen[str]
    log: Path
    timeout: float

    def send(self, message: dict[str, Any]) -> None:
        """Ask for something."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as e:
            raise WorkerFailed(self._reason()) from e

    def receive(self) -> dict[str, Any]:
        """The next answer. Raises WorkerFailed."""
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], self.timeout)[0]:  # one line is one answer: nothing waits in a buffer
            self.process.kill()
            raise WorkerFailed(f"no answer within {self.timeout:.0f} s; last in its log: {self._last_line()}")
        line = stdout.readline()
        if not line:
            raise WorkerFailed(self._reason())
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] == "failed":
            raise WorkerFailed(" ".join(answer["error"].split())[:500])
        return answer

    def kernels(self) -> list[str]:
        """What vLLM says about the kernels that it chose, from the engine's log."""
        pattern = re.compile(r"(Using [^\n]*(?:backend|kernel|Kernel)[^\n]*)")
        found = pattern.findall(self.log.read_text(errors="replace"))
        return list(dict.fromkeys(" ".join(line.split())[:200] for line in found))

    def _reason(self) -> str:
        return f"its process ended with code {self.process.wait()}: {self._last_line()}"

    def _last_line(self) -> str:
        lines = [t for t in self.log.read_text(errors="replace").splitlines() if t.strip()]
        errors = [t for t in lines if re.search(r"\b\w*(Error|Exception)\b:", t)]
        return (errors or lines or ["no output"])[-1].strip()[:500]


@contextlib.contextmanager
def _worker(engine: Engine, options: ServeOptions, directory: Path) -> Iterator[Worker]:
    model = write_model(directory / f"model-{engine.name}", engine, options.layers)
    request = directory / f"{engine.name}.json"
    content = {
        "model": str(model),
        "weights": options.load,
        "form": engine.form,
        "options": engine_options(options),
        "arguments": engine.arguments,
    }
    request.write_text(json.dumps(content))
    folder = options.logs or directory
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{engine.name}.log"
    variables = dict(os.environ)
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    variables.pop("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", None)
    if options.routing == "uniform":
        variables["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *WORKER, str(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
        )
        try:
            yield Worker(engine, process, log, options.timeout)
        except BaseException:
            process.kill()
            raise
        finally:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
