# SPDX-License-Identifier: Apache-2.0
"""Timing of GPU work: CUDA graphs, replayed in turn and timed with events, several input sets in rotation."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Calls = Sequence[Callable[[], object]]


class Timed:
    """One captured graph and the times of its replays.

    `calls` (one per layer, so that no weight is found in the L2 cache) are captured in order, `rounds` times over.
    """

    def __init__(self, calls: Calls, rounds: int = 4) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rounds):
                outputs = [call() for call in calls]  # alive together: each call writes memory of its own
                del outputs
        self._count = rounds * len(calls)
        self._times: list[float] = []

    def replay(self, *, timed: bool = True) -> None:
        """One replay; waits for its end."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        stop.record()
        stop.synchronize()
        if timed:
            self._times.append(start.elapsed_time(stop) * 1e3 / self._count)

    @property
    def us(self) -> float:
        """Median time of one call in microseconds."""
        return statistics.median(self._times)


def interleaved_us(
    kernels: Mapping[str, Calls], *, rounds: int = 4, repeats: int = 15
) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds of a call by name, and why the others could not run.

    Every kernel is captured first; then they are replayed in turn, `repeats` times over, each time in another order: a
    drift of the clocks, and what the kernel before has left of the power budget, meet all of them alike.
    """
    graphs: dict[str, Timed] = {}
    failed: dict[str, str] = {}
    for name, calls in kernels.items():
        try:
            graphs[name] = Timed(calls, rounds)
        except Exception as e:  # a peer that refuses a shape must not cost the others their numbers
            failed[name] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    for graph in graphs.values():
        for _ in range(2):
            graph.replay(timed=False)
    order = random.Random(0)
    for _ in range(repeats):
        for graph in order.sample(list(graphs.values()), len(graphs)):
            graph.replay()
    return {name: graph.us for name, graph in graphs.items()}, failed


def graph_time_us(calls: Calls, *, rounds: int = 4, repeats: int = 15) -> float:
    """Median time of one call in microseconds."""
    graph = Timed(calls, rounds)
    for _ in range(3):
        graph.replay(timed=False)
    for _ in range(repeats):
        graph.replay()
    return graph.us


def copy_bandwidth() -> float:
    """Bytes per second of a large elementwise kernel, read plus written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    us = graph_time_us([lambda: torch.mul(source, 1.5, out=target)], rounds=2, repeats=7)
    return 2 * source.nbytes / us * 1e6


def matmul_flops(n: int = 8192) -> float:
    """FLOP per second of a large BF16 matrix multiplication by torch (cuBLAS)."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us = graph_time_us([lambda: a @ b], rounds=4, repeats=7)
    return 2 * n**3 / us * 1e6
