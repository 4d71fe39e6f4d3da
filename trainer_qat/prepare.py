# SPDX-License-Identifier: Apache-2.0
"""Put weight-only NVFP4 fake quantization on a Hugging Face model, and take it off again.

Parameters, their names and the state dict stay those of the plain model, so `save_pretrained`, optimizers, FSDP2 and
checkpoints know nothing of it (torch's parametrizations rename parameters, and transformers then saves and re-loads a
checkpoint without its experts). Two hooks:

- Fused experts (transformers 5) run through an experts implementation that the model's config names. `quads_qat` is
  registered as one; it hands a view of the module with quantized weights to the implementation that the model had
  (eager, batched_mm, grouped_mm, ...). It acts on the parameter and does not care how it is multiplied with.
- A Linear's class is swapped for a subclass whose forward quantizes its weight. A class survives deepcopy, pickling,
  `fully_shard` (which subclasses it once more) and accelerate's replacement of `module.forward`; an instance attribute
  would be overwritten by the latter.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from trainer_qat.ablation import check_ablation, fake_quantize_activation
from trainer_qat.adapters import plain_model, require_no_prompt_learning
from trainer_qat.cache import CacheMode, optimizer_steps
from trainer_qat.experts import sorted_experts
from trainer_qat.inventory import Inventory, Weight, require_contract
from trainer_qat.quantizer import QatState, WeightQuantizer
from trainer_qat.scales import FROZEN_FILE, kept_or_current, load_frozen
from trainer_qat.schedule import Progress, Schedule
from vllm_quads.nvfp4 import Contract, ContractError, QuantizedSet, WeightGlobalScale, scale_group

IMPLEMENTATION = "quads_qat"
"""Name of the experts implementation."""
_STATE = "_quads_state"
_QUANTIZERS = "_quads_quantizers"
_INNER = "_quads_inner"


@dataclass(frozen=True)
class QatReport:
    """What `prepare_qat` did."""

    contract: Contract
    quantized: QuantizedSet
    """Canonical names and shapes of the fake-quantized matrices."""
    kept: Mapping[str, str]
    """Canonical name of every other weight -> why it stays as it is."""
    parameters: int
    """Parameters that were hooked (a fused stack of experts is one)."""
    bytes_bf16: int
    """BF16 bytes of the quantized weights."""
    bytes_packed: int
    """Their bytes in the rollout."""
    knobs: tuple[str, ...] = ()
    """Options that are not the default, in words."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary, for an experiment tracker."""
        return {
            "contract": self.contract.to_dict(),
            "quantized": {name: list(shape) for name, shape in self.quantized.shapes.items()},
            "kept": dict(self.kept),
            "parameters": self.parameters,
            "bytes_bf16": self.bytes_bf16,
            "bytes_packed": self.bytes_packed,
            "knobs": list(self.knobs),
        }

    def __str__(self) -> str:
        reasons: dict[str, int] = {}
        for why in self.kept.values():
            reasons[why] = reasons.get(why, 0) + 1
        lines = [
            f"NVFP4 fake quantization of {len(self.quantized)} matrices in {self.parameters} parameters: "
            f"{self.bytes_bf16 / 2**20:.1f} MiB in BF16, {self.bytes_packed / 2**20:.1f} MiB in the rollout"
        ]
        lines += [f"  {knob}" for knob in self.knobs]
        lines += [f"  kept: {count} ({why})" for why, count in sorted(reasons.items())]
        return "\n".join(lines)


def prepare_qat(
    model: nn.Module,
    contract: Contract | None = None,
    *,
    cache: CacheMode | str = CacheMode.AUTO,
    clamp_gradient: bool = False,
    frozen_from: Path | str | None = None,
    schedule: Schedule | None = None,
    scale_decay: float = 0.99,
    w4a4_ablation: bool = False,
) -> QatReport:
    """Fake-quantize the weights that the contract selects, in place; call it before or after `fully_shard`.

    Args:
        model: a Hugging Face model (or any module of `nn.Linear`s) with BF16, FP16 or FP32 weights. The optimizer,
            `save_pretrained` and gradient checkpointing are used as before.
        contract: what is quantized; the default quantizes all routed experts.
        cache: what is kept of a quantized weight between micro-batches (see `CacheMode`).
        clamp_gradient: zero the gradient where the quantizer saturates, instead of passing all of it through.
        frozen_from: with `weight_global_scale` "frozen" or "moving_average", a `quads` checkpoint (exported, or
            written by `quads quantize`) whose scales are taken up; without it they are those of the weights as they
            are now.
        schedule: the step from which weights are quantized, and the ramp; None quantizes from the start. Call
            `qat_step` or `follow_optimizer` (see `trainer_qat.steps`).
        scale_decay: decay of moving-average scales per optimizer step, 0 to 1; call `qat_step` as for a schedule.
        w4a4_ablation: quantize activations too (symmetric QAT), to compare with; see `trainer_qat.ablation`.

    Raises:
        ContractError: nothing matches, a selected weight cannot be quantized, the model carries adapters (PEFT), is
            quantized already, tensor parallel or prepared already.
    """
    contract = Contract() if contract is None else contract
    _check_arguments(
        model, contract, cache, schedule, scale_decay, clamp_gradient=clamp_gradient, w4a4_ablation=w4a4_ablation
    )
    require_no_prompt_learning(model)
    model = plain_model(model)
    _check_model(model)
    inventory = Inventory.of(model, contract)
    if w4a4_ablation:
        check_ablation(contract)
    progress = Progress(Schedule() if schedule is None else schedule)
    if progress.schedule != Schedule() or contract.weight_global_scale is WeightGlobalScale.MOVING_AVERAGE:
        progress.watched_from = optimizer_steps()
    state = QatState(
        contract, inventory.quantized, CacheMode(cache), clamp_gradient, progress, scale_decay, w4a4_ablation
    )
    quantizers = _quantizers(inventory.selected, state, frozen_from)  # whatever can fail comes before the hooks
    _hook(model, inventory.selected, quantizers, state)
    return QatReport(
        contract,
        inventory.quantized,
        inventory.kept,
        len(inventory.selected),
        inventory.bytes_bf16,
        inventory.bytes_packed,
        tuple(_describe(state)),
    )


def _quantizers(selected: Sequence[Weight], state: QatState, frozen_from: Path | str | None) -> list[WeightQuantizer]:
    """A quantizer for each selected weight, with the scale that is frozen, if it is."""
    frozen = state.contract.weight_global_scale is not WeightGlobalScale.LIVE
    if frozen_from is not None and not frozen:
        raise ContractError('frozen_from: needs weight_global_scale "frozen" or "moving_average" in the contract')
    kept_amax = load_frozen(Path(frozen_from), selected) if frozen_from is not None else None
    groups: dict[str, list[nn.Linear]] = {}
    for weight in selected:
        if isinstance(weight.module, nn.Linear):
            groups.setdefault(scale_group(weight.name), []).append(weight.module)
    quantizers = []
    for weight in selected:
        siblings = tuple(groups.get(scale_group(weight.name), ())) if isinstance(weight.module, nn.Linear) else ()
        quantizer = WeightQuantizer(weight.name, tuple(weight.matrices), state, siblings)
        if frozen:
            quantizer.frozen = kept_or_current(weight, siblings, kept_amax).to(weight.tensor.device)
        quantizers.append(quantizer)
    return quantizers


def _hook(model: nn.Module, selected: Sequence[Weight], quantizers: Sequence[WeightQuantizer], state: QatState) -> None:
    """Put the quantizers to work (see the module)."""
    for weight, quantizer in zip(selected, quantizers, strict=True):
        of_module = dict(getattr(weight.module, _QUANTIZERS, {}))
        setattr(weight.module, _QUANTIZERS, of_module | {weight.attribute: quantizer})
        if quantizer.siblings:
            weight.module.__class__ = _qat_class(type(weight.module))
    _hook_experts(model)
    setattr(model, _STATE, state)
    model.register_forward_pre_hook(_note_sharding)


def _describe(state: QatState) -> Iterator[str]:
    schedule, scale = state.progress.schedule, state.contract.weight_global_scale
    if schedule != Schedule():
        yield f"sets in after {schedule.start} optimizer steps, over a ramp of {schedule.ramp}"
    if scale is WeightGlobalScale.MOVING_AVERAGE:
        yield f"global scales: moving average, decay {state.scale_decay}"
    elif scale is WeightGlobalScale.FROZEN:
        yield "global scales: frozen"
    if state.w4a4_ablation:
        yield "ABLATION: activations are quantized as well (symmetric W4A4)"


def remove_qat(model: nn.Module) -> None:
    """Take fake quantization off; the model is the plain one again. Raises ContractError if it was not prepared."""
    root = _root(model)
    for module in root.modules():
        if type(module) in _PLAIN:  # FSDP2's subclass of ours stays; without a quantizer it is a plain Linear
            module.__class__ = _PLAIN[type(module)]
        inner = getattr(module, _INNER, None)
        if inner is not None and _config(module)._experts_implementation == IMPLEMENTATION:
            _config(module)._experts_implementation_internal = inner
        for attribute in (_QUANTIZERS, _INNER):
            if hasattr(module, attribute):
                delattr(module, attribute)
        for key in [k for k, h in module._forward_pre_hooks.items() if h in (_require_hooked, _note_sharding)]:
            del module._forward_pre_hooks[key]
    delattr(root, _STATE)


@contextlib.contextmanager
def qat_disabled(model: nn.Module) -> Iterator[None]:
    """Within this context the model computes with its BF16 (master) weights; for scoring and controls."""
    state = state_of(model)
    before, state.enabled = state.enabled, False
    try:
        yield
    finally:
        state.enabled = before


def state_of(model: nn.Module) -> QatState:
    """The shared state of a prepared model. Raises ContractError if `prepare_qat` has not been called on it."""
    state: QatState = getattr(_root(model), _STATE)
    return state


def _root(model: nn.Module) -> nn.Module:
    """The module that was prepared: the model, or what torch.compile or DistributedDataParallel wrap."""
    module: object = model
    while isinstance(module, nn.Module):
        if hasattr(module, _STATE):
            return module
        inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        module = plain_model(module) if inner is None and plain_model(module) is not module else inner
    raise ContractError("the model has no fake quantization: call prepare_qat(model, contract) on this object first")


def is_prepared(model: nn.Module) -> bool:
    """True if `prepare_qat` has been called on this model."""
    try:
        _root(model)
    except ContractError:
        return False
    return True


def quantizers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, WeightQuantizer]]:
    """(module, name of its parameter, quantizer) of every fake-quantized parameter."""
    for module in model.modules():
        for attribute, quantizer in getattr(module, _QUANTIZERS, {}).items():
            yield module, attribute, quantizer


def quantizer_of(weight: Weight) -> WeightQuantizer | None:
    """The quantizer that the forward pass of the weight's module applies to it, or None."""
    quantizers: dict[str, WeightQuantizer] = getattr(weight.module, _QUANTIZERS, {})
    return quantizers.get(weight.attribute)


def is_hooked(weight: Weight) -> bool:
    """True if the forward pass of the weight's module quantizes it."""
    return quantizer_of(weight) is not None


def prepared_root(model: nn.Module) -> nn.Module:
    """The module that `prepare_qat` was called on. Raises ContractError if there is none."""
    return _root(model)


def clear_cache(model: nn.Module) -> None:
    """Free what is kept of the quantized weights, for example before a rollout in the same process."""
    for _, _, quantizer in quantizers_of(model):
        quantizer.cache.clear()


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_arguments(
    model: object, contract: object, cache: object, schedule: object, decay: object, **switches: object
) -> None:
    if not isinstance(model, nn.Module):
        raise ContractError(f"model: is {type(model).__name__}, expected a torch.nn.Module")
    require_contract(contract)
    for name, switch in switches.items():
        if not isinstance(switch, bool):  # the text "false" of a config would switch it on
            raise ContractError(f"{name}: is {switch!r}, expected True or False")
    if cache not in list(CacheMode):
        raise ContractError(f"cache: is {cache!r}, expected one of {[mode.value for mode in CacheMode]}")
    if not (schedule is None or isinstance(schedule, Schedule)):
        raise ContractError(f"schedule: is {type(schedule).__name__}, expected a trainer_qat.Schedule")
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ContractError(f"scale_decay: is {decay!r}, expected 0 <= decay < 1")


def _check_model(model: nn.Module) -> None:
    if is_prepared(model):
        raise ContractError("the model is prepared already; call remove_qat(model) before preparing it again")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ContractError(
            "the model was loaded with a quantization of its own; load the BF16 weights (quantization_config=None)"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise ContractError(
            "the model is tensor parallel: a shard's amax is not that of the full tensor; shard with FSDP2 instead"
        )


def frozen_amax(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name of each weight or stack -> float32 amax of its frozen scale; empty with live scales."""
    return {q.name: q.frozen for _, _, q in quantizers_of(model) if q.frozen is not None}


def save_frozen(model: nn.Module, checkpoint: Path) -> None:
    """Write the frozen amax values below a checkpoint directory; nothing with live scales."""
    tensors = {name: amax.cpu().contiguous() for name, amax in frozen_amax(model).items()}
    if tensors:
        path = checkpoint / FROZEN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})


# --- linears ---------------------------------------------------------------------------------------------------------


class QatLinear(nn.Linear):
    """A Linear that multiplies with its fake-quantized weight."""

    @property
    def quads_weight(self) -> Tensor:
        """The weight that is multiplied with, float [N, K], with straight-through gradient."""
        quantizer: WeightQuantizer | None = getattr(self, _QUANTIZERS, {}).get("weight")
        return self.weight if quantizer is None else quantizer(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """y = x Wq^T + b."""
        quantizer: WeightQuantizer | None = getattr(self, _QUANTIZERS, {}).get("weight")
        if quantizer is not None and quantizer.state.w4a4_ablation and quantizer.state.computes:
            input = fake_quantize_activation(input, quantizer.state.contract)
        return nn.functional.linear(input, self.quads_weight, self.bias)


_QAT: dict[type, type] = {nn.Linear: QatLinear}
_PLAIN: dict[type, type] = {QatLinear: nn.Linear}


def _qat_class(cls: type) -> type:
    """QatLinear, or for a subclass of Linear (an FSDP2 unit) a class that is both."""
    if cls not in _QAT:
        _QAT[cls] = type(f"Qat{cls.__name__}", (QatLinear, cls), {})
        _PLAIN[_QAT[cls]] = cls
    return _QAT[cls]


# --- fused experts ---------------------------------------------------------------------------------------------------


class _ExpertsView:
    """An experts module with other weights: what the inner implementation gets to see."""

    def __init__(self, module: nn.Module, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        self._module = module
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def expert_weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I] as the forward pass multiplies with them."""
    quantizers: dict[str, WeightQuantizer] = getattr(module, _QUANTIZERS, {})
    weights = []
    for attribute in ("gate_up_proj", "down_proj"):
        weight: Tensor = getattr(module, attribute)
        weights.append(quantizers[attribute](weight) if attribute in quantizers else weight)
    return weights[0], weights[1]


def experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The `quads_qat` experts implementation: the model's own one, on fake-quantized weights."""
    quantizers = getattr(self, _QUANTIZERS, None)
    if quantizers is None:
        raise ContractError(
            f"{type(self).__name__} runs the experts implementation {IMPLEMENTATION!r} but prepare_qat has not seen it"
        )
    state = next((q.state for q in quantizers.values()), None)
    if state is not None and state.w4a4_ablation and state.computes:
        operand = functools.partial(fake_quantize_activation, contract=state.contract)
        return sorted_experts(self, *expert_weights(self), *args, **kwargs, operand=operand)
    view = _ExpertsView(self, *expert_weights(self)) if quantizers else self
    return _inner_forward(self)(view, *args, **kwargs)


def _inner_forward(module: nn.Module) -> Callable[..., Tensor]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(getattr(module, _INNER), eager)
    return forward


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the fused experts that run through transformers' experts interface."""
    for path, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "config"):
            yield path, module


def _config(module: nn.Module) -> Any:
    return module.config


def _hook_experts(model: nn.Module) -> None:
    """Switch the configs of all quantized expert stacks to our implementation."""
    modules = [m for _, m in experts_of(model)]
    configs = {id(m.config): _config(m) for m in modules if getattr(m, _QUANTIZERS, {})}
    if not configs:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in modules:
        if id(module.config) in configs:  # layers that stay in BF16 share the config, so they run through it as well
            setattr(module, _INNER, _config(module)._experts_implementation or "eager")
            setattr(module, _QUANTIZERS, getattr(module, _QUANTIZERS, {}))
            module.register_forward_pre_hook(_require_hooked)
    for config in configs.values():
        config._experts_implementation_internal = IMPLEMENTATION


def _require_hooked(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: refuse to run unquantized because someone changed the experts implementation since."""
    current = _config(module)._experts_implementation
    if current != IMPLEMENTATION and not str(current).startswith("quads_"):
        raise ContractError(
            f"the experts implementation was set to {current!r} after prepare_qat, which would switch the fake "
            f"quantization off silently; choose it before prepare_qat, or call remove_qat"
        )


def _note_sharding(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model: FSDP2 may have been applied after prepare_qat; and somebody has to count steps."""
    if not torch.compiler.is_compiling():
        state: QatState = getattr(module, _STATE)
        # Any unit counts: with PEFT the root may be the wrapper around this module, and layers alone may be sharded.
        state.sharded = distributed.is_initialized() and any(isinstance(m, FSDPModule) for m in module.modules())
        progress = state.progress
        if progress.watched_from is not None and (progress.step or optimizer_steps() > progress.watched_from + 1):
            if not progress.step:
                warnings.warn(
                    f"{optimizer_steps() - progress.watched_from} optimizer steps without a qat_step(model): schedule "
                    f"and moving-average scales stand still; call follow_optimizer(model, optimizer) once",
                    stacklevel=2,
                )
            progress.watched_from = None
