# SPDX-License-Identifier: Apache-2.0
"""Seconds per phase of work that a GPU does later than it is asked to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from vllm_quads.plugin.streams import current_stream

_GOES_ON = contextlib.nullcontext()
"""A phase of the device ends where another one begins, not where the host leaves it."""


class PhaseTimer:
    """Adds up the time of named phases: of the stream that was current, on a GPU, else of the host. Never waits for the
    device before `seconds`.

    An event between two kernels costs a microsecond or two of the device, so that one ends a phase and begins the
    next, and a phase goes on until another one begins or `rest` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[str, float] = {}
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: tuple[str, torch.cuda.Event] | None = None
        self._stream = current_stream(device)
        """Looking it up for every phase would cost more than the rest of it."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Time what is done, or enqueued on the stream, inside."""
        if self._stream is None:
            return self._on_host(name)
        if self._open is None or self._open[0] != name:
            self._open = (name, self._ended())
        return _GOES_ON

    @contextlib.contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def rest(self) -> None:
        """What is enqueued from now on belongs to no phase."""
        if self._open is not None:
            self._ended()
            self._open = None

    def _ended(self) -> torch.cuda.Event:
        """The phase that is going on, if any, ends here; returns the event that says so."""
        now = torch.cuda.Event(enable_timing=True)
        now.record(self._stream)
        if self._open is not None:
            self._spans.append((*self._open, now))
        return now

    def add(self, name: str, seconds: float) -> None:
        """Add time of the host."""
        self._host[name] = self._host.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far; waits for the device."""
        self.rest()
        if self._spans:
            self._spans[-1][2].synchronize()
        for name, begin, end in self._spans:
            self.add(name, begin.elapsed_time(end) / 1000.0)
        self._spans.clear()
        return dict(self._host)
