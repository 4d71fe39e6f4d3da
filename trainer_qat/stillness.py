# SPDX-License-Identifier: Apache-2.0
"""Whether weights were changed while they were pushed: what then serves would be a mixture of two policies."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from trainer_qat.cache import optimizer_steps, optimizers_since
from vllm_quads.nvfp4 import RefitError


class Stillness:
    """The weights of a model at one moment, as far as the host can tell without looking at them.

    Notices in-place operations (version counters) and optimizer steps, fused ones and those of sharded weights too, of
    this process: of several ranks the one that holds the engine looks. Edits through `.data` are not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember the moment."""
        self._model = model
        self._steps = optimizer_steps()
        self._versions = _versions(model)

    def check(self) -> None:
        """Raise RefitError, naming the first weight that was changed since."""
        now = _versions(self._model)
        changed = next((name for name, version in self._versions.items() if now.get(name) != version), None)
        if changed is None:
            stepped = {
                id(p) for o in optimizers_since(self._steps) for group in o.param_groups for p in group["params"]
            }
            changed = next((name for name, p in self._model.named_parameters() if id(p) in stepped), None)
        if changed is not None:
            raise RefitError(
                f"{changed}: was changed while the push was under way, which so holds parts of two policies; let the "
                f"push return before the optimizer steps"
            )


def _versions(model: nn.Module) -> dict[str, int]:
    # Gathering bumps the counters of sharded weights; tensors of inference mode have none.
    return {
        name: p._version
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and not p.is_inference() and not p.is_meta
    }


__all__ = ["Stillness"]
