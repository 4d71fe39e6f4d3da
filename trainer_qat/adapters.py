# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters beside fake quantization: LoRA on linears that stay in BF16, and refusals of everything else.

A rollout has no adapters: it gets base weight + LoRA update, merged for each push. On a weight that is quantized that
would be another function than the trained one (the rollout quantizes the sum, the trainer the base alone), so it is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vllm_quads.nvfp4 import ContractError

_BASE = ".base_layer"


def plain_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside of a `peft.PeftModel`; any other model as it is."""
    if _is_peft(model) and hasattr(model, "get_base_model"):
        inner: nn.Module = model.get_base_model()  # type: ignore[operator]
        return inner
    return model


def require_no_prompt_learning(model: nn.Module) -> None:
    """Raise ContractError for learned prompts or prefixes: a rollout generates without them."""
    configs: Any = getattr(model, "peft_config", {}) if _is_peft(model) else {}
    for name in getattr(model, "active_adapters", ()) if configs else ():
        if getattr(configs.get(name), "is_prompt_learning", False):
            raise ContractError(
                f"the PEFT adapter {name!r} ({configs[name].peft_type.value}) learns a prompt, which no pushed weight "
                f"holds, so the rollout would be another policy; use LoRA on linears that stay in BF16, or train full "
                f"weights"
            )


def _is_peft(module: nn.Module) -> bool:
    # Base classes too: `fully_shard` swaps a module's class for a subclass of its own.
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


@dataclass(frozen=True)
class Adapters:
    """Where a model carries adapters; empty for a model without."""

    layers: dict[str, nn.Module]
    """PEFT's wrappers by path."""

    @staticmethod
    def of(model: nn.Module) -> Adapters:
        """The adapters of a plain model (see `plain_model`)."""
        return Adapters({path: module for path, module in model.named_modules() if path and _is_wrapper(module)})

    def owner(self, parameter: str) -> nn.Module | None:
        """The outermost wrapper that a parameter lies in."""
        return next((m for path, m in self.layers.items() if parameter.startswith(f"{path}.")), None)

    def adds(self, parameter: str) -> bool:
        """True for a parameter of an adapter, which the plain model does not have."""
        return any(
            parameter.startswith(f"{path}.") and not parameter.startswith(f"{path}{_BASE}.") for path in self.layers
        )

    @staticmethod
    def plain_name(parameter: str) -> str:
        """Name of a base parameter in the model without adapters."""
        return parameter.replace(_BASE, "")

    def check_mergeable(self) -> None:
        """Raise ContractError for an adapter whose merged weight is not simply base + LoRA update."""
        for path, module in self.layers.items():
            odd = _why_not_mergeable(module)
            if odd is not None:
                raise ContractError(
                    f"{path}: carries {odd}; QUADS merges plain LoRA of nn.Linear into what it pushes and exports, so "
                    f"call merge_and_unload(), or use plain LoRA"
                )

    @torch.no_grad()
    def updates(self, parameter: str) -> list[Tensor]:
        """What the active adapters add to a base weight; empty without an adapter. A collective if they are sharded."""
        owner: Any = self.owner(parameter)
        if owner is None or owner.merged or owner.disable_adapters or not parameter.endswith(f"{_BASE}.weight"):
            return []
        deltas = [owner.get_delta_weight(name) for name in owner.active_adapters if name in owner.lora_A]
        return [delta.full_tensor() if isinstance(delta, DTensor) else delta for delta in deltas]

    @staticmethod
    def merged(full: Tensor, updates: list[Tensor]) -> Tensor:
        """Base weight + updates, in the weight's dtype; `full` itself without any."""
        if not updates:
            return full
        total = full.to(torch.float32)
        for update in updates:
            total = total + update.to(torch.float32)
        return total.to(full.dtype)


def _is_wrapper(module: nn.Module) -> bool:
    return _is_peft(module) and (hasattr(module, "base_layer") or hasattr(module, "modules_to_save"))


def _why_not_mergeable(module: Any) -> str | None:
    kind = f"{type(module).__module__.removeprefix('peft.').removeprefix('tuners.')}.{type(module).__name__}"
    if not (isinstance(getattr(module, "base_layer", None), nn.Linear) and hasattr(module, "lora_A")):
        return f"a PEFT {kind}"
    if not hasattr(module, "get_delta_weight"):
        return f"a PEFT {kind}, which has no update of its own"
    if any(getattr(module, "use_dora", {}).values()):
        return "DoRA"
    if any(getattr(module, "lora_bias", {}).values()):
        return "LoRA with a bias"
    return None
