# SPDX-License-Identifier: Apache-2.0
"""Which rollout engine an in-process `LLM` is: one object for each, so that all who ask share its state."""

from __future__ import annotations

import weakref
from typing import Any

from vllm_quads.plugin import compat
from vllm_quads.plugin.engine import VllmEngine
from vllm_quads.plugin.launched import LaunchedEngine

_ENGINES: weakref.WeakKeyDictionary[Any, VllmEngine] = weakref.WeakKeyDictionary()


def adapt(obj: Any) -> VllmEngine | None:
    """Adapter for `vllm_quads.refit.as_engine`: knows vLLM's `LLM`."""
    if not type(obj).__module__.startswith("vllm.") or not hasattr(obj, "apply_model"):
        return None
    if obj not in _ENGINES:
        _ENGINES[obj] = LaunchedEngine(obj) if compat.is_launched(obj) else VllmEngine(obj)
    return _ENGINES[obj]


__all__ = ["adapt"]
