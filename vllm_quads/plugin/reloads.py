# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layerwise reload, from the view of one engine: has one begun, has one failed, what is to be loaded then.

A reload that fails leaves some layers with new weights and others on the meta device, together with tensors that vLLM
holds for them. What fails in a loader of QUADS is undone at once (`failed`). vLLM tells nobody of other failures: that
a reload has begun shows at modules without weights which it takes apart (`_Mark`), and that it has not ended at the
layers that still are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_quads.nvfp4 import QuadsError
from vllm_quads.plugin import compat

if TYPE_CHECKING:
    from vllm_quads.plugin.runtime import LayerRuntime

_WHAT_TO_DO = "reload a complete checkpoint, or push with trainer_qat.RolloutSync"


class Reloads:
    """Reloads of one engine (of this rank)."""

    def __init__(self, runtimes: Mapping[str, LayerRuntime]) -> None:
        self._runtimes = runtimes
        self._marks: tuple[_Mark, _Mark] | None = None
        self.count = 0
        """How many reloads have begun."""
        self._begun = False
        """True if a reload has begun, and may not have ended."""
        self._reason = ""
        """Why the last reload has failed, until all layers have been loaded since."""
        self._to_reload: set[str] = set()
        """Layers that have not been loaded since."""

    def watch(self, runtime: nn.Module) -> None:
        """Put the marks into a module of the model, once."""
        if self._marks is None:
            self._marks = _Mark(self._begins), _Mark(self._goes_on)
            for name, mark in zip(("reload_begins", "reload_goes_on"), self._marks, strict=True):
                runtime.add_module(name, mark)

    @property
    def refusal(self) -> str | None:
        """Why nothing can serve, or None."""
        if self._reason:
            return f"a reload has failed ({self._reason}), and layers of two checkpoints are mixed; {_WHAT_TO_DO}"
        if self._begun:
            self._begun = self._marks is not None and compat.in_reload(self._marks[0])
        return f"a reload has begun and has not been finished; {_WHAT_TO_DO}" if self._begun else None

    def failed(self, error: BaseException) -> None:
        """Loading has failed: if it was a reload, all layers get the tensors back that they had, and nothing serves
        until each of them has been loaded."""
        self._end(str(error) if isinstance(error, QuadsError) else f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """End a reload that was not finished, if there is one, as after a failure."""
        if self._begun:
            self._end("it was not finished")

    def loaded(self, runtime: LayerRuntime) -> None:
        """A layer has been loaded whole."""
        if self._reason:
            self._to_reload -= {key for key, other in self._runtimes.items() if other is runtime}
            if not self._to_reload:
                self._reason = ""

    def replaced(self) -> None:
        """All weights have been replaced, not by a reload."""
        self._reason = ""

    def _end(self, reason: str) -> None:
        if self._marks is not None and compat.abandon_reload(self._marks[0]):
            self._refuse(reason)
        self._begun = False

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        self._to_reload = set(self._runtimes)
        for runtime in self._runtimes.values():
            runtime.loader.reload_abandoned()

    # -- what vLLM does with the marks: the first tells of the next reload only if it is out of the last one ----------

    def _begins(self) -> None:
        assert self._marks is not None
        if compat.restart_reload(self._marks[0]):
            self._refuse("it was not finished")
        self._begun = True
        self.count += 1

    def _goes_on(self) -> None:
        assert self._marks is not None
        compat.leave_reload(self._marks[0])


class _Mark(nn.Module):
    """A module without weights that tells when a reload takes it apart, which replaces its buffer by one on meta."""

    def __init__(self, taken_apart: Callable[[], None]) -> None:
        super().__init__()
        self._taken_apart: Callable[[], None] | None = None
        self.register_buffer("mark", torch.empty(0), persistent=False)
        self._taken_apart = taken_apart

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        if tensor is not None and tensor.is_meta and self._taken_apart is not None:
            self._taken_apart()


__all__ = ["Reloads"]
