# SPDX-License-Identifier: Apache-2.0
"""A refit under way on one rank: what was announced, what has arrived, what has been written."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_quads.compensation import CompensationState
from vllm_quads.kernels.tensors import TensorDigests
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.arrivals import Arrivals
from vllm_quads.plugin.backends import Receipt
from vllm_quads.plugin.flags import Flags
from vllm_quads.plugin.inventory import Plan
from vllm_quads.plugin.phases import PhaseTimer
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.plugin.undo import UndoLog
from vllm_quads.refit import Manifest


@dataclass
class OpenRefit:
    """State of one refit; a session has at most one."""

    manifest: Manifest
    plan: Plan
    timer: PhaseTimer
    arrivals: dict[str, Arrivals]
    """Unit name -> what has arrived of it; removed when it is installed."""
    outstanding: set[str]
    """Tensors that have not been sent."""
    units_left: dict[str, int]
    """Layer -> units that are not installed yet."""
    before: dict[str, int]
    """Digests of the units of this rank before the refit."""
    reloads: int
    """How many reloads by vLLM had begun before."""
    versions: dict[str, int]
    """Layer -> version of its loader, as this refit has left it: a higher one has been loaded by somebody else."""
    partial: list[str]
    """Layers that held half-loaded weights before the refit."""
    serving_before: str | None
    """Why the engine did not serve before the refit, or None."""
    undo: UndoLog | None
    digests: Tensor
    """Of every matrix of this rank (`DigestTable`)."""
    receipts: Mapping[str, list[Receipt]]
    """Unit name -> what writing each of its sections leaves behind."""
    status: Tensor
    """int32 [units]: what a `WeightHolder` has found while it wrote (`kernels.install`)."""
    stream: torch.cuda.Stream | None
    """On which everything is done; None on a CPU."""
    plain: TensorDigests | None
    """Of every tensor that is not quantized, as it arrived; None if they are not wanted."""
    flags: Flags = field(default_factory=Flags)
    loaders: dict[str, Any] = field(default_factory=dict)
    """Layer -> what its loader remembers of the time before."""
    unsettled: list[LayerRuntime] = field(default_factory=list)
    """Complete layers whose derived operands are still the old ones."""
    compensation: CompensationState | None = None
    receiving: bool = False
    """True while tensors are being taken from the sender."""
    ended: str = ""
    """How it ended, once it has: what still arrives then must not be written."""
    touched: bool = False
    """True once something was written."""
    bytes: int = 0
    last: str = "(nothing yet)"
    """Tensor that was received last."""
    kinds: set[str] = field(default_factory=set)
    """Forms in which quantized weights came."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while something is written and while the refit ends: another thread may abort it."""

    def writing(self) -> _Writing:
        """A context that keeps the refit from ending meanwhile. Raises RefitError if it has ended."""
        return _Writing(self)


class _Writing:
    """See `OpenRefit.writing`, which is asked for every unit: a generator would cost several times as much."""

    __slots__ = ("_refit",)

    def __init__(self, refit: OpenRefit) -> None:
        self._refit = refit

    def __enter__(self) -> None:
        self._refit.lock.acquire()
        if self._refit.ended:
            self._refit.lock.release()
            raise RefitError(self._refit.ended)

    def __exit__(self, *_: object) -> None:
        self._refit.lock.release()
