# SPDX-License-Identifier: Apache-2.0
"""Look at every quantized GEMM of a model while it runs: inputs and outputs per compensation site.

Fused experts run through an experts implementation of their own here (sorted by expert, one GEMM per expert), because
the usual ones do not expose what is between the two GEMMs. Weights are those of the forward pass: fake-quantized if the
model is prepared, plain otherwise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer_qat.adapters import plain_model
from trainer_qat.experts import sorted_experts
from trainer_qat.inventory import Weight, decoder_layers, require_contract, stack_problem, weights_of
from trainer_qat.prepare import expert_weights, experts_of, is_prepared, state_of
from vllm_quads.nvfp4 import Contract, ContractError, canonical_name, scale_group

IMPLEMENTATION = "quads_observe"
_OBSERVER = "_quads_observer"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")


@dataclass(frozen=True)
class Site:
    """One GEMM operand: all linears (or experts) that multiply the same activations."""

    name: str
    """`...experts.w13`, `...experts.w2`, or the scale group of a dense linear."""
    per_expert_input: bool
    """True for w2."""


@dataclass(frozen=True)
class Pass:
    """One GEMM of one forward pass, as an observer gets it."""

    site: Site
    matrix: str
    """Canonical name of the matrix or stack."""
    x: Tensor
    """Input rows [M, K]; of w13 all tokens once, of w2 one row per (token, expert) pair."""
    y: Tensor
    """Output [..., N] as it goes on through the graph; of w13 and w2 one row per (token, expert) pair."""
    expert: Tensor | None
    """Expert of each output row, int64 [M]; None for a dense linear."""


Observer = Callable[[Pass], None]


def site_of(matrix: str) -> Site:
    """The site that a canonical matrix or stack name belongs to."""
    name = canonical_name(matrix)
    match = _EXPERT.match(name)
    head, leaf = (match.group(1), match.group(3)) if match else name.rpartition(".")[::2]
    if head.endswith(".experts"):
        return Site(f"{head}.{'w2' if leaf == 'down_proj' else 'w13'}", leaf == "down_proj")
    return Site(scale_group(name), False)


@contextlib.contextmanager
def observing(model: nn.Module, contract: Contract | None, observer: Observer) -> Iterator[None]:
    """Call `observer` for every GEMM that the contract quantizes, in the order of the forward pass.

    contract: None takes that of a prepared model. Raises ContractError as `prepare_qat` does.
    """
    quantized = {name for w in quantized_weights(model, contract) for name in w.matrices}
    handles: list[Any] = []
    configs: dict[int, tuple[Any, str]] = {}
    observed: list[nn.Module] = []
    try:
        model = plain_model(model)
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and canonical_name(f"{path}.weight") in quantized:
                handles.append(module.register_forward_hook(_linear_hook(canonical_name(path), observer)))
        stacks = [(canonical_name(path), m) for path, m in experts_of(model)]
        stacks = [(path, m) for path, m in stacks if f"{path}.0.gate_proj" in quantized and _is_stack(m)]
        for path, module in stacks:
            setattr(module, _OBSERVER, (path, observer))
            observed.append(module)
            config: Any = module.config
            configs.setdefault(id(config), (config, config._experts_implementation))
        if configs:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
        for config, _ in configs.values():
            config._experts_implementation_internal = IMPLEMENTATION
        yield
    finally:
        for config, before in configs.values():
            config._experts_implementation_internal = before
        for module in observed:
            delattr(module, _OBSERVER)
        for handle in handles:
            handle.remove()


def quantized_weights(model: nn.Module, contract: Contract | None) -> list[Weight]:
    """The quantized parameters: of a prepared model those that are, otherwise those that the contract names."""
    if contract is not None:
        require_contract(contract)
    weights = list(weights_of(model))
    if is_prepared(model):
        names = state_of(model).quantized
    elif contract is not None:
        shapes = {name: shape for w in weights for name, shape in w.matrices.items()}
        names = contract.resolve(shapes, decoder_layers(model))
    else:
        raise ContractError("the model is not prepared: give the contract that names what is quantized")
    return [w for w in weights if all(name in names for name in w.matrices)]


def _is_stack(module: nn.Module) -> bool:
    problem = stack_problem(module)
    if problem is not None:
        raise ContractError(problem)
    return True


def _linear_hook(matrix: str, observer: Observer) -> Callable[[nn.Module, Any, Tensor], None]:
    site = site_of(matrix)

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        expert = None
        if site.name.endswith((".experts.w13", ".experts.w2")):
            number = int(matrix.rpartition(".experts.")[2].partition(".")[0])
            expert = torch.full((output.flatten(0, -2).shape[0],), number, device=output.device)
        x = args[0].reshape(-1, args[0].shape[-1])
        observer(Pass(site, matrix, x, output, expert))

    return hook


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The `quads_observe` experts implementation; [M, H] to [M, H]."""
    observed = getattr(self, _OBSERVER, None)

    def watch(part: str, x: Tensor, y: Tensor, expert: Tensor) -> None:
        if observed is not None:
            path, observer = observed
            observer(Pass(site_of(f"{path}.{part}"), f"{path}.{part}", x, y, expert))

    return sorted_experts(self, *expert_weights(self), hidden_states, top_k_index, top_k_weights, watch=watch)
