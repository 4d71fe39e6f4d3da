# SPDX-License-Identifier: Apache-2.0
"""What reaches an engine in other processes: `Control` with small messages, `DataPlane` with tensors (see `remote`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

WORKER = "weight_transfer_engine"
"""Attribute of a vLLM worker that answers questions: `collective_rpc("weight_transfer_engine", args=("status",))`."""


class Control(Protocol):
    """Small messages to an engine. Methods raise RefitError if the engine cannot be reached or refuses."""

    label: str
    """What the engine is, for messages."""
    can_pause: bool
    """False for an engine that runs requests only while its caller waits for them."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; one result per worker."""

    def init(self, info: Mapping[str, Any]) -> None:
        """vLLM's `init_weight_transfer_engine`."""

    def start(self) -> None:
        """vLLM's `start_weight_update`."""

    def update(self, info: Mapping[str, Any]) -> None:
        """vLLM's `update_weights`."""

    def finish(self) -> None:
        """vLLM's `finish_weight_update`."""

    def set_weight_version(self, version: str) -> None:
        """Label what is generated from now on, where vLLM can (0.27 and newer)."""

    def pause(self, mode: str) -> None:
        """Stop scheduling; returns when no request is running."""

    def resume(self) -> None:
        """Go on scheduling."""

    def is_paused(self) -> bool:
        """True if scheduling is stopped."""

    def require_idle(self) -> None:
        """Raise RefitError if requests are running in an engine that cannot pause."""

    def reset_prefix_cache(self, running: bool) -> bool:
        """Forget cached key/value blocks; running: also those of frozen requests, which are computed anew."""

    def sleep(self, level: int) -> None:
        """Give GPU memory back: 1 keeps the weights in CPU memory, 2 drops them."""

    def wake_up(self, tags: list[str] | None) -> None:
        """Take GPU memory again; scheduling goes on when all of it is there."""


class Messenger(Protocol):
    """What a data plane needs of a `Control`: its messages, marked with the push that they belong to."""

    def update(self, info: Mapping[str, Any]) -> None:
        """vLLM's `update_weights`."""


class DataPlane(Protocol):
    """Tensors to the workers of an engine."""

    name: str
    bucket_bytes: int
    """How much is sent with one message."""

    def connect(self, control: Control, instance: str) -> None:
        """Get ready for a push; instance changes when the engine has been started anew."""

    def send(self, control: Messenger, tensors: list[tuple[str, Tensor]]) -> None:
        """Deliver tensors to every worker; they may be reused when this returns."""

    def close(self) -> None:
        """Give resources back."""


__all__ = ["WORKER", "Control", "DataPlane", "Messenger"]
