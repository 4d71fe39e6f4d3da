# SPDX-License-Identifier: Apache-2.0
"""The refit protocol: manifest first, tensors next, then one commit that either happens or does not.

engine.begin(manifest)      validates everything that can be known before a byte moves
engine.load(tensors)        any number of times, in any grouping; complete layers are installed as they arrive
engine.commit(digests, plain)   compares the digests of both sides (of units of quantized weights, and of the tensors
                            that are not quantized, by name), refreshes compensation, returns the report
engine.abort()              ends a refit that cannot go on; also the effect of any failure above

From the first installed layer to the end of the refit no forward pass runs. After a failure the previous weights serve
on, or the engine refuses to serve: `Manifest.rollback` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from vllm_quads.nvfp4.contract import Contract, QuantizedSet
from vllm_quads.nvfp4.errors import RefitError
from vllm_quads.refit.manifest import Manifest
from vllm_quads.refit.report import RefitReport


class Lasting:
    """Tensors that stay as they are until the refit has ended: an engine in the same process reads them where they lie.

    What else is passed to `load` may be overwritten when `load` returns or, unless it is a sequence, as soon as the
    next tensor is asked for.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], *, resident: bool = False) -> None:
        """resident: weights that are not quantized lie in memory anyway, so that many of them may be held at once."""
        self._tensors = tensors
        self.resident = resident

    @property
    def passive(self) -> bool:
        """True if the tensors exist already, so that asking for the next one starts no work."""
        return isinstance(self._tensors, Sequence)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors)


@runtime_checkable
class RolloutEngine(Protocol):
    """A rollout engine as the trainer sees it."""

    def contract(self) -> Contract: ...

    def quantized(self) -> QuantizedSet: ...

    def fingerprint(self) -> str: ...

    def policy_version(self) -> int: ...

    def begin(self, manifest: Manifest) -> None: ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def commit(
        self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None
    ) -> RefitReport: ...

    def abort(self) -> None: ...


@runtime_checkable
class CollectiveEngine(RolloutEngine, Protocol):
    """One rank of an engine whose ranks live in the trainer's processes, each pushed to by its own.

    The ranks decide together: `begin` and the end of a refit (`commit`, `abort`, or a `load` that fails) are
    collectives of the engine. A trainer comes to each of the two once on every rank, and lets no interrupt end it
    before.
    """

    collective: bool
    """True."""

    def decline(self, error: BaseException) -> None:
        """Instead of `begin`, because this rank's trainer cannot come to it. A collective."""


class CollectiveError(RefitError):
    """A collective of the trainer's ranks has failed on this one, so that nothing can follow that all take part in.

    A `CollectiveEngine` whose tensors end with it ends the refit on its rank without asking the others.
    """


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
        f"{type(obj).__name__} is not a rollout engine that QUADS knows: pass a vLLM `LLM` or `AsyncLLM` started "
        f'with quantization="quads", the address of a server (http://host:8000), or an object with the methods of '
        f"`vllm_quads.refit.RolloutEngine`"
    )
