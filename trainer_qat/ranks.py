# SPDX-License-Identifier: Apache-2.0
"""The ranks that share one model: who acts for all, and how they all learn of an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vllm_quads.nvfp4 import QuadsError
from vllm_quads.refit import CollectiveError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """The ranks over which a model is sharded."""

    sharded: bool
    """False for a model that is whole on every rank (also under DistributedDataParallel)."""
    group: Any = None
    """Process group of the device mesh; None for all ranks."""

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        """The ranks of a model; modules are asked too, for a unit may hold its full parameters after a forward pass."""
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        if not meshes and not any(isinstance(m, FSDPModule) for m in model.modules()):
            return Ranks(False)
        # The mesh of a trainer that shares its world with others; larger meshes span the world.
        one_dimensional = bool(meshes) and meshes[0].ndim == 1
        return Ranks(True, meshes[0].get_group() if one_dimensional else None)

    @property
    def leads(self) -> bool:
        """True on the rank that acts for all of them."""
        return not self.sharded or dist.get_rank(self.group) == 0

    def agree(
        self, error: BaseException | None, what: str, kind: type[QuadsError] = QuadsError
    ) -> BaseException | None:
        """The error of this rank, or one (of this kind) that tells of another's; None if all went well. Collective."""
        if not self.sharded:
            return error
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        other = next((f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None), None)
        return kind(f"{what} failed on {other}") if error is None and other is not None else error

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around nothing but collectives: one that has failed is told apart from everything else.

        Raises CollectiveError (of a model that is not sharded nothing), after which this rank must not enter another
        one: those that still wait would take it for the one that has failed.
        """
        try:
            yield
        except CollectiveError:
            raise
        except Exception as e:
            if not self.sharded:
                raise
            raise CollectiveError(
                f"{what}: could not be gathered on this rank ({type(e).__name__}: {e}); the other ranks wait in the "
                f"same collective, or have ended, and cannot be told: end this process, its process group is of no "
                f"more use"
            ) from e

    @contextlib.contextmanager
    def together(self, what: str, kind: type[QuadsError] = QuadsError) -> Iterator[None]:
        """What a rank does alone in the block has failed on all ranks (see `agree`) if it has on one. A collective, at
        the end of the block."""
        error: BaseException | None = None
        try:
            yield
        except CollectiveError:
            raise
        except BaseException as e:
            error = e
        error = self.agree(error, what, kind)
        if error is not None:
            raise error

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in their order. A collective."""
        if not self.sharded:
            return [value]
        values: list[_T] = [value] * dist.get_world_size(self.group)
        with self.collective("what each rank has to say"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def differ(self, value: object) -> bool:
        """True if the ranks do not have equal values. A collective."""
        values = self.gather(value)
        return any(v != values[0] for v in values)

    def share(self, value: _T) -> _T:
        """The leading rank's value, on all of them. A collective."""
        if not self.sharded:
            return value
        values = [value]
        with self.collective("what the leading rank has to say"):
            dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]


def reshard(model: nn.Module) -> None:
    """Let FSDP2 units go of gathered parameters: no optimizer step since is in them.

    FSDP2 keeps those of its root after a forward pass that no backward pass follows (scoring, for example).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def drain(items: Iterator[Any]) -> None:
    """Take part in the gathering that other ranks still need."""
    for _ in items:
        pass
