# SPDX-License-Identifier: Apache-2.0
"""Timing of GPU work: CUDA-graph replays timed with events, several input sets in rotation, median of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_time_us(calls: Sequence[Callable[[], object]], *, rounds: int = 4, repeats: int = 15) -> float:
    """Median time of one call in microseconds.

    `calls` (one per layer, so that no weight is found in the L2 cache) are captured in order, `rounds` times over, into
    one CUDA graph; replays are timed with events.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large elementwise kernel, read plus written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    us = graph_time_us([lambda: torch.mul(source, 1.5, out=target)], rounds=2, repeats=7)
    return 2 * source.nbytes / us * 1e6
