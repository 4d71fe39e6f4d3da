# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while ranks work together: one that leaves a collective half-way leaves the others waiting in it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Hold:
    """SIGINT, put off or let through."""

    def __init__(self, usual: Callable[[int, FrameType | None], Any]) -> None:
        self._usual = usual
        self.open = False
        """True while a SIGINT is let through."""
        self.seen = False
        """True if one waits."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.open or self.seen:
            # Closed before anything is raised: whatever cleans up after the interruption is not interrupted as well.
            self.open = self.seen = False
            self._usual(number, frame)
        else:
            self.seen = True

    def let_through(self) -> None:
        """Open, and obey what has waited."""
        self.open = True
        if self.seen:
            signal.raise_signal(signal.SIGINT)


_hold: _Hold | None = None


@contextlib.contextmanager
def uninterrupted(wanted: bool = True) -> Iterator[None]:
    """Put the first SIGINT off until the end of the block; a second one is obeyed at once.

    wanted: False does nothing. Neither is anything done outside of the main thread, which Python never interrupts, nor
    in a block that is itself uninterrupted.
    """
    global _hold
    usual = signal.getsignal(signal.SIGINT) if wanted else None
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
    elif _hold is None:
        hold = _Hold(usual)
        try:
            _hold = hold
            signal.signal(signal.SIGINT, hold)
            yield
        finally:
            _hold = None
            signal.signal(signal.SIGINT, usual)
            if hold.seen:
                signal.raise_signal(signal.SIGINT)
    elif not _hold.open:
        yield
    else:
        hold = _hold
        hold.open = False
        try:
            yield
        finally:
            hold.let_through()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within an uninterrupted block: a part that SIGINT may end, at once if it has come before."""
    hold = _hold if threading.current_thread() is threading.main_thread() else None
    if hold is None or hold.open:
        yield
        return
    try:
        hold.let_through()
        yield
    finally:
        hold.open = False


def whole_steps(items: Iterator[_T]) -> Iterator[_T]:
    """The items, each of which is made without an interruption: what has made them can go on afterwards."""
    while True:
        with uninterrupted():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


__all__ = ["interruptible", "uninterrupted", "whole_steps"]
