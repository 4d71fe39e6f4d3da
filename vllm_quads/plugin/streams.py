# SPDX-License-Identifier: Apache-2.0
"""One stream for all that a refit does on a GPU, whichever streams its tensors arrive on.

vLLM's NCCL engine receives into two buffers on two streams in turn. What a unit waits for may have come on the other
one, and memory that was taken on one is given back while the other still reads it, unless one stream does all the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The device's current stream; None for a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def ordered(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue on this stream what is enqueued inside: after all that the current one has been asked for, and before all
    that it will be asked for."""
    current = None if stream is None else torch.cuda.current_stream(stream.device)
    if stream is None or current is None or current == stream:
        yield
        return
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
