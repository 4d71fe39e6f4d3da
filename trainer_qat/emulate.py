# SPDX-License-Identifier: Apache-2.0
"""The rollout's numerics inside of the Hugging Face model: W4A4 with residual compensation, by the exact reference.

What an engine of the same contract and compensation state multiplies, so that a gap can be taken apart without one.
For probes: the reference is plain torch and far slower than training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer_qat.inventory import Weight, require_contract, stack_problem
from trainer_qat.observe import quantized_weights, site_of
from trainer_qat.prepare import IMPLEMENTATION as TRAINED
from trainer_qat.prepare import experts_forward as trained_experts_forward
from trainer_qat.prepare import is_prepared, quantizers_of, state_of
from trainer_qat.quantizer import WeightQuantizer, shared_amax
from vllm_quads.compensation import (
    CompensationState,
    SiteState,
    experts_forward,
    linear_forward,
    prepare_experts,
    prepare_matrix,
)
from vllm_quads.nvfp4 import (
    ActivationGlobalScale,
    Contract,
    ContractError,
    PackedTensor,
    QuadsError,
    Scheme,
    scale_group,
)
from vllm_quads.nvfp4.names import expert_index, layer_index

IMPLEMENTATION = "quads_emulate"
_EMULATION = "_quads_emulation"


class Emulation:
    """What is emulated, and with which state; `layers` may be changed between forward passes."""

    def __init__(
        self, model: nn.Module, contract: Contract | None, compensation: CompensationState | None, decode: Tensor | bool
    ) -> None:
        self.contract = state_of(model).contract if contract is None else contract
        require_contract(self.contract)
        scheme, scale = self.contract.scheme, self.contract.activation.global_scale
        if scheme is Scheme.W4A4 and scale is ActivationGlobalScale.STATIC:
            raise ContractError("activation.global_scale: is 'static', whose input scales are in a checkpoint only")
        self.sites = {} if compensation is None else compensation.sites
        self.decode = decode
        self.layers: Collection[int] | None = None
        """Decoder layers that are emulated; None means all."""
        self.weights = quantized_weights(model, self.contract)
        self.quantizers = {q.name: q for _, _, q in quantizers_of(model)} if is_prepared(model) else {}
        self._groups: dict[str, list[Weight]] = {}
        for weight in self.weights:
            self._groups.setdefault(scale_group(weight.name), []).append(weight)

    def site(self, name: str, device: torch.device) -> SiteState | None:
        """State of a site, or None if there is none."""
        site = self.sites.get(name)
        return None if site is None else SiteState(site.center.to(device), site.blocks.to(device))

    def covers(self, name: str) -> bool:
        """True if the weight of this canonical name lies in an emulated layer."""
        return self.layers is None or layer_index(name) in self.layers

    def packed(self, weight: Weight) -> PackedTensor:
        """The bytes that a push would send for this weight, as it is now."""
        quantizer: WeightQuantizer | None = self.quantizers.get(weight.name)
        tensor = weight.tensor.detach()
        if quantizer is not None:
            amax = quantizer.amax(tensor)
        elif tensor.dim() == 3:
            amax = None
        else:
            amax = shared_amax([w.tensor for w in self._groups[scale_group(weight.name)]], weight.name)
        return PackedTensor.quantize(tensor, amax=amax, name=weight.name)

    def decode_rows(self, rows: int, device: torch.device) -> Tensor:
        """bool [rows]: which input rows count as decode tokens."""
        if isinstance(self.decode, Tensor):
            if self.decode.numel() != rows:
                raise QuadsError(
                    f"decode: has {self.decode.numel()} tokens, but a quantized linear sees {rows} rows; give one bool "
                    f"for all (experts that are modules of their own see only the tokens routed to them)"
                )
            return self.decode.to(device).flatten()
        return torch.full((rows,), bool(self.decode), device=device)


@contextlib.contextmanager
def emulated_rollout(
    model: nn.Module,
    contract: Contract | None = None,
    compensation: CompensationState | None = None,
    *,
    decode: Tensor | bool = True,
) -> Iterator[Emulation]:
    """Within this context the quantized GEMMs of the model compute what a rollout engine would.

    Args:
        contract: None takes that of a prepared model.
        compensation: the engine's state (`as_engine(llm).compensation()`, or `calibrate`); None means no centring and
            no selected blocks, as in a fresh engine.
        decode: which tokens the engine decoded one by one, bool [B, T] or one for all; the others were prefilled.
            Form.AUTO treats them differently.

    Raises ContractError as `prepare_qat` does, and for static activation scales.
    """
    emulation = Emulation(model, contract, compensation, decode)
    handles: list[Any] = []
    stacks: dict[int, dict[str, Weight]] = {}
    modules: dict[int, nn.Module] = {}
    for weight in emulation.weights:
        if weight.tensor.dim() == 2:
            handles.append(weight.module.register_forward_hook(_linear_hook(weight, emulation)))
            continue
        problem = stack_problem(weight.module)
        if problem is not None:
            raise ContractError(problem)
        stacks.setdefault(id(weight.module), {})[weight.attribute] = weight
        modules[id(weight.module)] = weight.module
    configs: dict[int, tuple[Any, str]] = {}
    try:
        for key, module in modules.items():
            config: Any = module.config
            configs.setdefault(id(config), (config, config._experts_implementation))
            setattr(module, _EMULATION, (emulation, stacks[key], configs[id(config)][1]))
        if configs:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
        for module in model.modules():  # layers that stay in BF16 share the config
            owner: Any = getattr(module, "config", None)
            if id(owner) in configs and hasattr(module, "is_concatenated") and not hasattr(module, _EMULATION):
                setattr(module, _EMULATION, (None, {}, configs[id(owner)][1]))
                modules[id(module)] = module
        for config, _ in configs.values():
            config._experts_implementation_internal = IMPLEMENTATION
        yield emulation
    finally:
        for config, before in configs.values():
            config._experts_implementation_internal = before
        for module in modules.values():
            if hasattr(module, _EMULATION):
                delattr(module, _EMULATION)
        for handle in handles:
            handle.remove()


def _linear_hook(weight: Weight, emulation: Emulation) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
    name = site_of(weight.name).name
    group = expert_index(weight.name) or 0 if name.endswith(".w2") else 0

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not emulation.covers(weight.name):
            return None
        x = args[0].reshape(-1, args[0].shape[-1])
        site, packed = emulation.site(name, x.device), emulation.packed(weight)
        blocks, center = (None, None) if site is None else (site.blocks[group], site.center)
        matrix = prepare_matrix(packed.scaled(), packed.decode_scale.expand(packed.shape[0]), blocks, center)
        decode = emulation.decode_rows(x.shape[0], x.device)
        y = linear_forward(x, matrix, emulation.contract, site=site, decode=decode)
        bias: Tensor | None = getattr(module, "bias", None)
        return (y if bias is None else y + bias).view(output.shape)

    return hook


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The `quads_emulate` experts implementation; [M, H] to [M, H]."""
    emulation, weights, before = getattr(self, _EMULATION)
    first = next(iter(weights.values()), None)
    if emulation is None or first is None or not emulation.covers(first.name):
        return _plain_forward(self, before)(self, hidden_states, top_k_index, top_k_weights)
    device = hidden_states.device
    w13, w2 = emulation.packed(weights["gate_up_proj"]), emulation.packed(weights["down_proj"])
    path = first.name.rpartition(".")[0]
    w13_site, w2_site = (emulation.site(f"{path}.{part}", device) for part in ("w13", "w2"))
    experts = prepare_experts(
        (w13.codes, w13.block_scales, w13.decode_scale[:, None].expand(-1, 2)),
        (w2.codes, w2.block_scales, w2.decode_scale),
        w13_site,
        w2_site,
    )
    decode = emulation.decode_rows(hidden_states.shape[0], device)
    return experts_forward(
        hidden_states, experts, top_k_weights, top_k_index, emulation.contract, w13_site=w13_site, decode=decode
    )


def _plain_forward(module: nn.Module, implementation: str) -> Callable[..., Tensor]:
    """What the module would have run."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if implementation == TRAINED:
        return trained_experts_forward
    eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(implementation or "eager", eager)
    return forward
