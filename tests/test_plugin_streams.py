# SPDX-License-Identifier: Apache-2.0
"""A refit works on one stream, in order with those on which its tensors arrive; streams are fakes here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("vllm")

from vllm_quads.plugin.streams import current_stream, ordered


@dataclass
class Stream:
    """Writes down what it waits for."""

    name: str
    log: list[str] = field(compare=False)
    device: str = "cuda:0"

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_work_is_ordered_with_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refit's stream waits for the current one before, and the current one for it after, also if the work fails; on
    the same stream, and on a CPU, nothing waits."""
    log: list[str] = []
    own, side = Stream("own", log), Stream("side", log)
    current = [side]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    with ordered(own):  # type: ignore[arg-type]
        log.append(f"on {current[-1].name}")
        with ordered(own):  # type: ignore[arg-type]
            log.append(f"on {current[-1].name}")
    assert log == ["own waits for side", "on own", "on own", "side waits for own"]
    log.clear()
    with pytest.raises(OSError, match="broken"), ordered(own):  # type: ignore[arg-type]
        raise OSError("broken")
    assert log == ["own waits for side", "side waits for own"]
    assert current_stream(torch.device("cuda")) is not None
    assert current_stream(torch.device("cpu")) is None
    with ordered(None):
        pass
    assert len(log) == 2
