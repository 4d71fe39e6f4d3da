# SPDX-License-Identifier: Apache-2.0
"""What fake quantization costs a Qwen3-MoE training step on one GPU; writes a JSON result after every arm.

    python -m benchmarks.training --out quads-bench
    torchrun --nproc-per-node 2 -m benchmarks.training --layers 16 --no-peers     # FSDP2, tokens are those of a rank

Needs transformers and a CUDA GPU; vLLM is not used.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer_qat.bench import (
    Arm,
    MatrixQuantizer,
    StepBench,
    layers_that_fit,
    modelopt_formula,
    modelopt_kernel,
    ratios,
    verl_kernel,
)
from trainer_qat.cache import CacheMode
from vllm_quads.bench import environment
from vllm_quads.bench.result import Result, Series

BASELINE = "BF16"
_START = time.monotonic()
PEERS: dict[str, Callable[[], MatrixQuantizer | None]] = {
    "ModelOpt's Triton kernel, per expert": modelopt_kernel,
    "verl's Triton kernel, per expert": verl_kernel,
    "ModelOpt's formula in torch, per expert": lambda: modelopt_formula,
}
"""What makes each; None where its package is not installed."""


def shard(model: nn.Module) -> None:
    """FSDP2, a unit for each decoder layer."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)


def start_ranks() -> int:
    """Number of ranks; under torchrun the process group is set up first."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return ranks


def arms_of(bench: StepBench, steps: int) -> Iterator[Arm]:
    """Our arms on one model; the baseline comes first, and once more when what is compared with it is measured."""
    kinds: list[tuple[str, AbstractContextManager[None]]] = [
        (BASELINE, nullcontext()),
        ("QAT, packed cache", bench.quantized(CacheMode.PACKED)),
        ("QAT, BF16 cache", bench.quantized(CacheMode.DENSE)),
        (BASELINE, nullcontext()),
        ("QAT, no cache", bench.quantized(CacheMode.NONE)),
    ]
    for i, (name, context) in enumerate(kinds):
        with context:
            yield bench.measure(name, steps, warm_up=1 if i else 2)


def peers_of(bench: StepBench, steps: int) -> Iterator[Arm]:
    """Other trainers' fake quantization, expert by expert, on the same model."""
    for name, make in PEERS.items():
        if (quantize := make()) is not None:
            with bench.per_expert(quantize):
                yield bench.measure(name, steps, warm_up=1)
        else:
            say(f"{name}: not installed")


def say(*words: object) -> None:
    """Print on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{time.monotonic() - _START:6.1f} s", *words, flush=True)


def _line(arm: Arm) -> str:
    return f"{arm.name}: {arm.step_ms:.1f} ms, peak {arm.peak_bytes / 2**30:.2f} GiB, loss {arm.loss:.6f}"


class Table:
    """Collects arms and writes them as a result, as often as one likes."""

    def __init__(self, bench: StepBench, out: Path, settings: dict[str, Any], suffix: str) -> None:
        """suffix: of the result's name."""
        self._bench, self._out, self._settings, self._suffix = bench, out, settings, suffix
        self._arms: dict[int, dict[str, Arm]] = {}

    def add(self, tokens: int, arm: Arm) -> None:
        """One arm with this many tokens in a micro-batch, after the baseline; the same arm again counts as the mean."""
        arms = self._arms.setdefault(tokens, {})
        ratio = arm.step_ms / arms.get(BASELINE, arm).step_ms
        say(f"{tokens} tokens, {_line(arm)}, {ratio:.4f} of BF16")
        if before := arms.get(arm.name):
            before.step_ms = (before.step_ms + arm.step_ms) / 2
            before.steps_ms += arm.steps_ms
        else:
            arms[arm.name] = arm
        self.save()

    def _series(self) -> tuple[Series, ...]:
        series: dict[str, Series] = {}
        for tokens, arms in self._arms.items():
            relative = ratios(list(arms.values()), arms[BASELINE], self._bench.quantized_bytes)
            for arm in arms.values():
                role = "peer" if arm.name == BASELINE or arm.name in PEERS else "quads"
                for name, kind, unit, value in (
                    (arm.name, role, "ms", arm.step_ms),
                    (f"{arm.name}: step time / BF16", "check", "ratio", relative[arm.name]["step time"]),
                    (f"{arm.name}: peak above BF16 / BF16 bytes", "check", "ratio", relative[arm.name]["memory"]),
                ):
                    series.setdefault(name, Series(name, kind, unit, {})).values[tokens] = value
        return tuple(series.values())

    def _details(self) -> dict[str, dict[str, object]]:
        details: dict[str, dict[str, object]] = {}
        for tokens, arms in self._arms.items():
            for arm in arms.values():
                detail = {"steps_ms": arm.steps_ms, "peak_bytes": arm.peak_bytes, "loss": arm.loss}
                details.setdefault(arm.name, {})[str(tokens)] = detail
        return details

    def show(self) -> None:
        """Print what is relative to the baseline."""
        for s in self._series():
            if s.role == "check":
                say(s.name, {x: round(v, 4) for x, v in s.values.items()})

    def save(self) -> None:
        """Write what there is, on rank 0."""
        ranks = self._settings["ranks"]
        model = f"{self._settings['layers']} layers of Qwen3-30B-A3B" + (
            f" under FSDP2 on {ranks} GPUs" if ranks > 1 else ""
        )
        result = Result(
            "training",
            f"Training step of {model}, weights of the routed experts in NVFP4",
            "tokens of a micro-batch",
            self._series(),
            environment.describe(),
            {
                "name": "qwen3-30b-a3b" + self._suffix + (f"-fsdp{ranks}" if ranks > 1 else ""),
                **self._settings,
                "vocabulary": self._bench.vocabulary,
                "optimizer": "AdamW, fused, BF16 weights, gradients and states",
                "gradient_checkpointing": True,
                "experts_implementation": "grouped_mm",
                "quantized_bf16_bytes": self._bench.quantized_bytes,
            },
            details=self._details(),
        )
        if int(os.environ.get("RANK", "0")) == 0:
            result.save(self._out / f"{result.stem}.json")


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="8192,2048", help="tokens of a micro-batch; peers run at the first only")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="default: as many as fit")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("quads-bench"))
    args = parser.parse_args()
    tokens = [int(t) for t in args.tokens.split(",")]
    environment.require_or_exit(hopper=False, vllm=False)
    ranks = start_ranks()
    layers = args.layers or layers_that_fit(torch.cuda.mem_get_info()[0], max(tokens))
    wrap = shard if ranks > 1 else lambda model: None
    bench = StepBench.build(layers, tokens[0], args.micro_batches, wrap=wrap)
    say(f"{layers} layers, {bench.quantized_bytes / 2**30:.2f} GiB of routed experts in BF16, {ranks} ranks")
    settings = {"layers": layers, "ranks": ranks, "micro_batches": args.micro_batches}
    table = Table(bench, args.out, settings, f"-{layers}-layers" if args.layers else "")
    for i, count in enumerate(tokens):
        bench.set_batches(count, args.micro_batches)
        for arm in arms_of(bench, args.steps):
            table.add(count, arm)
        if i == 0 and not args.no_peers:
            for arm in peers_of(bench, 2):
                table.add(count, arm)
    table.show()
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
