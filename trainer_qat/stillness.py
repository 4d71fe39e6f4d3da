# SPDX-License-Identifier: Apache-2.0
"""Whether weights were changed while they were pushed: what then serves would be a mixture of two policies."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer_qat.cache import optimizer_steps, optimizers_since
from trainer_qat.ranks import Ranks
from vllm_quads.nvfp4 import RefitError


class Stillness:
    """The weights of a model at one moment, as far as the host can tell without looking at them.

    Notices in-place operations (version counters) and optimizer steps, fused ones too, of this process; of a sharded
    model each rank knows about its shards. Edits through `.data` are not noticed.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        """Remember the moment. ranks: those that share the model; None is this process alone."""
        self._model = model
        self._ranks = ranks or Ranks(False)
        self._steps = optimizer_steps()
        self._seen = {name: (p, _version(p)) for name, p in model.named_parameters()}

    def check(self, changed: str | None) -> None:
        """Raise RefitError, naming the first weight that was changed since, on all ranks. A collective if sharded.

        changed: what `changed` says in this process.
        """
        changes = self._ranks.gather(changed)
        rank, first = next(((r, name) for r, name in enumerate(changes) if name is not None), (0, None))
        if first is not None:
            where = f" on rank {rank}" if self._ranks.sharded else ""
            raise RefitError(
                f"{first}: was changed{where} while the push was under way, which so holds parts of two policies; "
                f"let the push return before the optimizer steps"
            )

    def changed(self) -> str | None:
        """A weight of this process that was changed since."""
        now = dict(self._model.named_parameters())
        for name, (p, version) in self._seen.items():
            # Of a sharded weight the model may hold the gathered form for a while.
            replaced = not isinstance(p, DTensor) and now.get(name) is not p
            if replaced or _version(p) != version:
                return name
        stepped = {id(p) for o in optimizers_since(self._steps) for group in o.param_groups for p in group["params"]}
        return next((name for name, (p, _) in self._seen.items() if id(p) in stepped), None)


def _version(p: Tensor) -> tuple[int, ...]:
    # Tensors of inference mode have no counter. A shard has one of its own: operations on it leave its wrapper's alone.
    if p.is_inference() or p.is_meta:
        return ()
    return (p._version, *_version(p._local_tensor)) if isinstance(p, DTensor) else (p._version,)


__all__ = ["Stillness"]
