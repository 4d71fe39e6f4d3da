# SPDX-License-Identifier: Apache-2.0
"""The refit protocol: manifest first, tensors next, then one commit that either happens or does not.

engine.begin(manifest)      validates everything that can be known before a byte moves
engine.load(tensors)        any number of times, in any grouping; the serving weights do not change
engine.commit()             swaps the staged weights in, recomputes what is derived, returns the report
engine.abort()              forgets what was staged; also the effect of any failure above
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vllm_quads.nvfp4.contract import Contract, QuantizedSet
from vllm_quads.nvfp4.errors import RefitError


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Manifest:
    """What a push is going to send."""

    contract: Contract
    quantized: QuantizedSet
    """Canonical names and shapes of the quantized weights; must equal the engine's set."""
    tensors: Mapping[str, TensorSpec]
    """Every tensor of the payload under its checkpoint name (`...gate_proj.weight`, `.weight_scale`,
    `.weight_scale_2` for packed weights, plain names for the rest)."""
    fingerprint: str
    """Fingerprint of the quantized weights, computed by the trainer; the engine must arrive at the same one."""
    policy_version: int
    compensation: Mapping[str, Tensor] = field(default_factory=dict)
    """Optional sensitivities, site name -> float32 scalar, from the trainer's gradients."""


@dataclass(frozen=True)
class RefitReport:
    """What a committed refit did."""

    policy_version: int
    fingerprint: str
    tensors: int
    bytes: int
    seconds: Mapping[str, float]
    """Seconds per phase."""


@runtime_checkable
class RolloutEngine(Protocol):
    """A rollout engine as the trainer sees it."""

    def contract(self) -> Contract: ...

    def quantized(self) -> QuantizedSet: ...

    def fingerprint(self) -> str: ...

    def policy_version(self) -> int: ...

    def begin(self, manifest: Manifest) -> None: ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def commit(self) -> RefitReport: ...

    def abort(self) -> None: ...


_ADAPTERS: list[Callable[[Any], RolloutEngine | None]] = []


def register_adapter(adapter: Callable[[Any], RolloutEngine | None]) -> None:
    """Teach `as_engine` a kind of engine; the adapter returns None for objects that are not its own."""
    if adapter not in _ADAPTERS:
        _ADAPTERS.append(adapter)


def as_engine(obj: Any) -> RolloutEngine:
    """The protocol object for an engine such as vLLM's `LLM`. Raises RefitError if nothing knows it."""
    if isinstance(obj, RolloutEngine):
        return obj
    for adapter in _ADAPTERS:
        engine = adapter(obj)
        if engine is not None:
            return engine
    raise RefitError(
        f"{type(obj).__name__} is not a rollout engine that QUADS knows: pass an in-process vLLM `LLM` started with "
        f'quantization="quads", or an object with the methods of `vllm_quads.refit.RolloutEngine`'
    )
