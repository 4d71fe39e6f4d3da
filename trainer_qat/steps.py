# SPDX-License-Identifier: Apache-2.0
"""What happens once per optimizer step: the schedule goes on, and moving-average scales follow the weights.

The state of both is not part of the model's state dict, which stays that of the plain model; save `qat_state_dict`
beside it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer_qat.cache import optimizer_steps
from trainer_qat.prepare import prepared_root, quantizers_of, state_of
from trainer_qat.quantizer import shared_amax
from trainer_qat.ranks import reshard
from trainer_qat.schedule import Progress
from vllm_quads.nvfp4 import ContractError, WeightGlobalScale

_STEP = "step"
_AMAX = "amax."
_FOLLOWED: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Prepared model -> the handle that `follow_optimizer` gave last."""


def qat_step(model: nn.Module) -> None:
    """Tell a prepared model that the optimizer has made a step. All ranks call it, after `optimizer.step()`.

    Needed only with a schedule or moving-average scales; see `follow_optimizer` for doing it automatically. A moving
    average becomes decay * average + (1 - decay) * amax of the weights as they are now.
    """
    state = state_of(model)
    _notice_double_counting(state.progress)
    state.progress.move_to(state.progress.step + 1)
    if state.contract.weight_global_scale is not WeightGlobalScale.MOVING_AVERAGE:
        return
    reshard(model)
    with torch.no_grad():
        for module, attribute, quantizer in quantizers_of(model):
            weights = [s.weight for s in quantizer.siblings] or [getattr(module, attribute)]
            now = shared_amax(weights, quantizer.name)
            assert quantizer.frozen is not None
            # In place: a compiled graph keeps reading the same tensor. One rounding per operation, the same everywhere.
            share = now.to(quantizer.frozen.device) * (1 - state.scale_decay)
            quantizer.frozen.mul_(state.scale_decay).add_(share)
            quantizer.cache.clear()


def _notice_double_counting(progress: Progress) -> None:
    """Two callers, `follow_optimizer` and a callback for example, would make a schedule run at twice its speed."""
    now, before = optimizer_steps(), progress.counted_at
    progress.counted_at = now
    if before is None or progress.warned:
        return
    progress.driven |= now > before  # a torch optimizer is what makes the steps
    if progress.driven and now == before:
        progress.warned = True
        warnings.warn(
            "qat_step(model) was called twice without an optimizer step in between: steps are counted by one of "
            "follow_optimizer, a callback (FollowSteps, QuadsCallback) or qat_step, not by several",
            stacklevel=3,
        )


def follow_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Call `qat_step(model)` after every `optimizer.step()`; the handle's `remove()` ends it.

    A wrapper (accelerate's) is looked through. Raises ContractError if the model is not prepared.
    """
    root = prepared_root(model)
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(inner, "register_step_post_hook"):
        raise ContractError(
            f"optimizer: is {type(optimizer).__name__}, expected a torch optimizer; call qat_step(model) after each of "
            f"its steps instead"
        )
    before = _FOLLOWED.get(root)
    hooks = None if before is None else before.hooks_dict_ref()  # None if that optimizer is gone
    if before is not None and hooks is not None and before.id in hooks:
        warnings.warn(
            "the model follows an optimizer already, so steps are going to count twice: follow one optimizer, or "
            "call remove() of the first handle",
            stacklevel=2,
        )
    handle: RemovableHandle = inner.register_step_post_hook(lambda *_: qat_step(model))
    _FOLLOWED[root] = handle
    return handle


def qat_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Optimizer steps taken (`step`, int64 scalar) and the amax of frozen or moving-average scales (`amax.NAME`)."""
    state: dict[str, Tensor] = {_STEP: torch.tensor(state_of(model).progress.step)}
    for _, _, quantizer in quantizers_of(model):
        if quantizer.frozen is not None:
            state[_AMAX + quantizer.name] = quantizer.frozen.detach().clone()
    return state


def load_qat_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue where `qat_state_dict` was taken. Raises ContractError if it is that of another model or contract."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ContractError("load_qat_state_dict: expected the tensors by name that qat_state_dict gives")
    mine = qat_state_dict(model)
    if state.keys() != mine.keys():
        odd = sorted(state.keys() ^ mine.keys())[0]
        where = "the given state" if odd in state else "the model"
        raise ContractError(f"load_qat_state_dict: only {where} has {odd!r}; it belongs to another model or contract")
    for name, value in state.items():
        if value.shape != mine[name].shape or value.dtype != mine[name].dtype:
            raise ContractError(
                f"load_qat_state_dict: {name} is {value.dtype} {tuple(value.shape)}, expected {mine[name].dtype} "
                f"{tuple(mine[name].shape)}"
            )
        if not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ContractError(f"load_qat_state_dict: {name} is not finite and at least 0; take another checkpoint")
    for _, _, quantizer in quantizers_of(model):
        if quantizer.frozen is not None:
            quantizer.frozen.copy_(state[_AMAX + quantizer.name])
            quantizer.cache.clear()
    state_of(model).progress.move_to(int(state[_STEP]))
