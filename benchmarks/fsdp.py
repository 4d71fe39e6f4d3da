# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two or more GPUs against one: same bytes at the start, same losses, in every cache mode.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 -m benchmarks.fsdp

Layers of Qwen3-30B-A3B's shapes. Every rank first trains alone on the whole batch, then all together, each on its rows.
"""

from __future__ import annotations

import torch
from torch import distributed as dist

from benchmarks.training import say, shard, start_ranks
from trainer_qat import RolloutSync, prepare_qat
from trainer_qat.bench import StepBench
from trainer_qat.cache import CacheMode
from trainer_qat.prepare import quantizers_of
from vllm_quads.bench import environment

STEPS, LAYERS, TOKENS = 5, 2, 1024


def batch(seed: int) -> torch.Tensor:
    """Token ids int64 [ranks, TOKENS], the same on every rank; there are two batches."""
    generator = torch.Generator().manual_seed(seed % 2)
    return torch.randint(0, 6000, (dist.get_world_size(), TOKENS), generator=generator)


def fingerprint(bench: StepBench) -> str:
    """Fingerprint of what a push would send; all ranks take part."""
    return RolloutSync(bench.model, None).payload.fingerprint()


def train(bench: StepBench, sharded: bool) -> list[float]:
    """Losses of a few AdamW steps with two micro-batches, averaged over ranks."""
    for group in bench.optimizer.param_groups:
        group["lr"] = 3e-4
    losses = []
    device = next(bench.model.parameters()).device
    for i in range(STEPS):
        bench.optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in range(2):
            ids = batch(i + micro).to(device)
            ids = ids[dist.get_rank()].unsqueeze(0) if sharded else ids
            loss = bench.model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            total += loss.detach()
        bench.optimizer.step()
        if sharded:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def main() -> None:
    """Run and print; exits with an error if bytes differ or losses part by more than 2 %."""
    environment.require_or_exit(hopper=False, vllm=False)
    if start_ranks() < 2:
        raise SystemExit("start this with torchrun on two or more GPUs")
    alone = StepBench.build(LAYERS, 64, 1)
    prepare_qat(alone.model)
    start, expected = fingerprint(alone), train(alone, False)
    say("one process", start, [round(x, 4) for x in expected])
    del alone
    for mode in CacheMode:
        torch.cuda.empty_cache()
        bench = StepBench.build(LAYERS, 64, 1, wrap=shard)
        prepare_qat(bench.model, cache=mode)
        same = fingerprint(bench) == start
        losses = train(bench, True)
        ends: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, fingerprint(bench))
        worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        caches = [q.cache for _, _, q in quantizers_of(bench.model)]
        say(
            f"FSDP2, cache {mode.value}: losses {[round(x, 4) for x in losses]}, same bytes at the start {same}, ranks "
            f"agree at the end {len(set(ends)) == 1}, largest relative difference of a loss {worst:.4f}, "
            f"hits {sum(c.hits for c in caches)}, misses {sum(c.misses for c in caches)}"
        )
        if not same or len(set(ends)) > 1 or worst > 0.02:
            raise SystemExit("FSDP2 does not train what one process trains")
        del bench
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
