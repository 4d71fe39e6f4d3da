# SPDX-License-Identifier: Apache-2.0
"""`quads bench quantize`: the fused activation quantization with residual, against the copy bandwidth of the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm_quads.bench import environment, floors
from vllm_quads.bench.result import Result, Series
from vllm_quads.bench.timing import copy_bandwidth, interleaved_us
from vllm_quads.kernels.layout import by_chunk
from vllm_quads.kernels.quantize import quantize_merged, quantize_packed
from vllm_quads.nvfp4.errors import QuadsError
from vllm_quads.nvfp4.formats import check_k

ROWS = (1, 16, 64, 256, 1024, 4096, 16384, 32768)
CHANNELS = (768, 2048, 7168)
GROUPS = 128
_ROTATED_BYTES = 256 << 20
"""Inputs and outputs of the calls in rotation: several times the L2 cache, so that they come from memory."""
_MOST_SETS = 64
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Kernel:
    """A form of the quantization kernel that is measured."""

    name: str
    run: Callable[[Tensor, _State], object]
    bytes: Callable[[int, int], int]
    """(rows, K) -> bytes read and written."""


class _State:
    """What a kernel needs beside the activations [M, K]."""

    def __init__(self, rows: int, k: int) -> None:
        gen = torch.Generator(device="cuda").manual_seed(k)
        self.center = by_chunk(torch.randn(k, device="cuda", generator=gen) * 0.01)
        blocks = torch.randperm(k // 16, device="cuda", generator=gen)[: max(1, k // 64)].sort().values
        self.blocks = blocks.to(torch.int32)
        self.mask = torch.zeros(1, k // 16, dtype=torch.bool, device="cuda")
        self.mask[0, blocks] = True
        self.masks = torch.rand(GROUPS, k // 16, device="cuda", generator=gen) < 0.25
        self.group = torch.randint(0, GROUPS, (rows,), device="cuda", generator=gen, dtype=torch.int32)


def _packed_bytes(rows: int, k: int) -> int:
    columns = k // 16 + max(1, k // 64)
    return rows * (2 * k + 9 * columns + 4)


KERNELS = (
    Kernel("merged, plain", lambda x, s: quantize_merged(x), floors.quantize_bytes),
    Kernel("merged, 4/6", lambda x, s: quantize_merged(x, four_over_six=True), floors.quantize_bytes),
    Kernel(
        "merged, 4/6 + centring, residual 25 %",
        lambda x, s: quantize_merged(x, four_over_six=True, center=s.center, center_by_chunk=True, mask=s.mask),
        floors.quantize_bytes,
    ),
    Kernel(
        "merged, 4/6 + centring, residual 100 % (default contract)",
        lambda x, s: quantize_merged(x, four_over_six=True, center=s.center, center_by_chunk=True, full_all=True),
        floors.quantize_bytes,
    ),
    Kernel(
        "merged, 4/6, residual 25 % by expert (w2's input)",
        lambda x, s: quantize_merged(x, four_over_six=True, mask=s.masks, group=s.group),
        floors.quantize_bytes,
    ),
    Kernel(
        "packed K+S, plain, residual 25 %",
        lambda x, s: quantize_packed(x, blocks=s.blocks),
        _packed_bytes,
    ),
)


def run_quantize(
    rows: Sequence[int] = ROWS,
    channels: Sequence[int] = CHANNELS,
    *,
    repeats: int = 15,
    progress: Progress = lambda *_: None,
) -> list[Result]:
    """One result per K. Raises MissingEnvironment where there is no Hopper GPU."""
    for k in channels:
        check_k(k, "--channels")
    if not rows or min(rows) < 1:
        raise QuadsError("--rows: expected numbers of rows, each 1 or more")
    environment.require(vllm=False)
    steps, done = len(rows) * len(channels) + 1, 0
    progress(done, steps, "copy bandwidth")
    bandwidth = copy_bandwidth()
    results = []
    for k in channels:
        times: dict[str, dict[int, float]] = {kernel.name: {} for kernel in KERNELS}
        missing: dict[str, str] = {}
        for m in rows:
            done += 1
            progress(done, steps, f"{m} x {k}")
            measured, failed = interleaved_us(_calls(m, k), repeats=repeats)
            for name, us in measured.items():
                times[name][m] = us
            missing |= {f"{name} at {m} rows": why for name, why in failed.items()}
        results.append(_result(k, times, missing, bandwidth, repeats))
    progress(steps, steps, "")
    return results


def _calls(m: int, k: int) -> dict[str, list[Callable[[], object]]]:
    sets = max(2, min(_MOST_SETS, -(-_ROTATED_BYTES // floors.quantize_bytes(m, k))))
    gen = torch.Generator(device="cuda").manual_seed(m)
    xs = [_activations(m, k, gen) for _ in range(sets)]
    state = _State(m, k)
    return {kernel.name: [partial(kernel.run, x, state) for x in xs] for kernel in KERNELS}


def _activations(m: int, k: int, gen: torch.Generator) -> Tensor:
    """BF16 [M, K] with outlier channels (one in 32, twenty times as large) and rows of different scale."""
    channels = torch.where(torch.rand(k, device=gen.device, generator=gen) < 1 / 32, 20.0, 1.0)
    rows = torch.exp(0.5 * torch.randn(m, 1, device=gen.device, generator=gen))
    return (torch.randn(m, k, device=gen.device, generator=gen) * channels * rows).to(torch.bfloat16)


def _result(
    k: int, times: dict[str, dict[int, float]], missing: dict[str, str], bandwidth: float, repeats: int
) -> Result:
    series = [Series(name, "quads", "us", values) for name, values in times.items() if values]
    rows = sorted({m for values in times.values() for m in values})
    copy = {m: floors.quantize_bytes(m, k) / bandwidth * 1e6 for m in rows}
    series.append(Series("floor: 16 bits in and out", "floor", "us", copy))
    for kernel in KERNELS:
        share = {m: kernel.bytes(m, k) / (us * 1e-6) / bandwidth for m, us in times[kernel.name].items()}
        if share:
            series.append(Series(f"share of copy bandwidth: {kernel.name}", "check", "share", share))
    return Result(
        "quantize",
        f"Activation quantization with residual, K = {k}",
        "rows",
        tuple(series),
        environment.describe(),
        {"name": f"k{k}", "channels": k, "repeats": repeats, "dtype": "bfloat16", "form": "CUDA graph, inputs rotated"},
        {"copy bandwidth, bytes/s": bandwidth},
        missing=missing,
    )
