# SPDX-License-Identifier: Apache-2.0
"""What fake quantization costs a Qwen3-MoE training step on one GPU; writes a JSON result.

    python -m benchmarks.training --out quads-bench
    torchrun --nproc-per-node 2 -m benchmarks.training --layers 16 --no-peers     # FSDP2, tokens are those of a rank

Needs transformers and a CUDA GPU; vLLM is not used.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer_qat.bench import Arm, StepBench, layers_that_fit, modelopt_formula, modelopt_kernel, ratios
from trainer_qat.cache import CacheMode
from vllm_quads.bench import environment
from vllm_quads.bench.result import Result, Series

BASELINE = "BF16"
PEERS = {
    "ModelOpt's Triton kernel, per expert": modelopt_kernel(),
    "ModelOpt's formula in torch, per expert": modelopt_formula,
}


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


def arms_of(bench: StepBench, steps: int, peers: bool) -> list[Arm]:
    """All arms on one model, the baseline first and last (the mean of both counts)."""
    kinds: dict[str, AbstractContextManager[None]] = {
        BASELINE: nullcontext(),
        "QAT, BF16 cache": bench.quantized(CacheMode.DENSE),
        "QAT, packed cache": bench.quantized(CacheMode.PACKED),
        "QAT, no cache": bench.quantized(CacheMode.NONE),
    }
    arms = []
    for name, context in kinds.items():
        with context:
            arms.append(bench.measure(name, steps))
            say(_line(arms[-1]))
    for name, quantize in PEERS.items() if peers else ():
        if quantize is not None:
            with bench.per_expert(quantize):
                arms.append(bench.measure(name, max(1, steps // 2), warm_up=1))
                say(_line(arms[-1]))
    again = bench.measure(BASELINE, steps, warm_up=1)
    say(_line(again), "(again)")
    arms[0].step_ms = (arms[0].step_ms + again.step_ms) / 2
    arms[0].steps_ms += again.steps_ms
    return arms


def say(*words: object) -> None:
    """Print on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*words, flush=True)


def _line(arm: Arm) -> str:
    return f"{arm.name}: {arm.step_ms:.1f} ms, peak {arm.peak_bytes / 2**30:.2f} GiB, loss {arm.loss:.6f}"


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
    environment.require(hopper=False, vllm=False)
    ranks = start_ranks()
    layers = args.layers or layers_that_fit(torch.cuda.mem_get_info()[0], max(tokens))
    wrap = shard if ranks > 1 else lambda model: None
    bench = StepBench.build(layers, tokens[0], args.micro_batches, wrap=wrap)
    say(f"{layers} layers, {bench.quantized_bytes / 2**30:.2f} GiB of routed experts in BF16, {ranks} ranks")
    series: dict[str, Series] = {}
    details: dict[str, dict[str, object]] = {}
    for i, count in enumerate(tokens):
        bench.set_batches(count, args.micro_batches)
        arms = arms_of(bench, args.steps, peers=i == 0 and not args.no_peers)
        relative = ratios(arms, arms[0], bench.quantized_bytes)
        for arm in arms:
            role = "peer" if arm.name == BASELINE or arm.name in PEERS else "quads"
            for name, kind, unit, value in (
                (arm.name, role, "ms", arm.step_ms),
                (f"{arm.name}: step time / BF16", "check", "ratio", relative[arm.name]["step time"]),
                (f"{arm.name}: peak above BF16 / BF16 bytes", "check", "ratio", relative[arm.name]["memory"]),
            ):
                series.setdefault(name, Series(name, kind, unit, {})).values[count] = value
            detail = details.setdefault(arm.name, {})
            detail[str(count)] = {"steps_ms": arm.steps_ms, "peak_bytes": arm.peak_bytes, "loss": arm.loss}
            say(count, arm.name, {k: round(v, 4) for k, v in relative[arm.name].items()})
    result = Result(
        "training",
        "Training step of Qwen3-30B-A3B's layers, weights of the routed experts in NVFP4",
        "tokens of a micro-batch",
        tuple(series.values()),
        environment.describe(),
        {
            "name": "qwen3-30b-a3b" + (f"-fsdp{ranks}" if ranks > 1 else ""),
            "ranks": ranks,
            "layers": layers,
            "vocabulary": bench.vocabulary,
            "micro_batches": args.micro_batches,
            "steps": args.steps,
            "optimizer": "AdamW, fused, BF16 weights, gradients and states",
            "gradient_checkpointing": True,
            "experts_implementation": "grouped_mm",
            "quantized_bf16_bytes": bench.quantized_bytes,
        },
        details=details,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        say("saved", result.save(args.out / f"{result.stem}.json").name)
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
