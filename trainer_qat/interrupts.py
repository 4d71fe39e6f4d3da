# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while ranks work together: one that leaves a collective half-way leaves the others waiting in it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def uninterrupted(wanted: bool = True) -> Iterator[None]:
    """Put the first SIGINT off until the end of the block; a second one is obeyed at once.

    wanted: False does nothing. Neither is anything done outside of the main thread, which Python never interrupts.
    """
    usual = signal.getsignal(signal.SIGINT) if wanted else None
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            usual(number, frame)
        seen = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if seen:
            signal.raise_signal(signal.SIGINT)


def whole_steps(items: Iterator[_T]) -> Iterator[_T]:
    """The items, each of which is made without an interruption: what has made them can go on afterwards."""
    while True:
        with uninterrupted():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


__all__ = ["uninterrupted", "whole_steps"]
