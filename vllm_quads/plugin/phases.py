# SPDX-License-Identifier: Apache-2.0
"""Seconds per phase of work that a GPU does later than it is asked to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class PhaseTimer:
    """Adds up the time of named phases: of the device where there is one, else of the host. Never waits for the device
    before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._stream: torch.cuda.Stream | None = None
        self.follow_stream()

    def follow_stream(self) -> None:
        """Time the stream that is current now. Looking it up for every phase would cost more than the rest of it."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done, or enqueued on the stream, inside."""
        if self._stream is None:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, time.perf_counter() - start)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        try:
            yield
        finally:
            end.record(self._stream)
            self._events.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        """Add time of the host."""
        self._host[name] = self._host.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far; waits for the device."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self.add(name, begin.elapsed_time(end) / 1000.0)
        self._events.clear()
        return dict(self._host)
