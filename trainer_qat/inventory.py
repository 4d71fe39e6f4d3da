# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model the contract quantizes, where they live, and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer_qat.adapters import Adapters, plain_model
from vllm_quads.nvfp4 import BLOCK_SIZE, Contract, ContractError, Kind, QuantizedSet, canonical_name, expand, kind_of
from vllm_quads.nvfp4.names import is_expert_stack, layer_index

_ADAPTER = (
    "it carries a PEFT adapter, and the rollout would quantize base weight + adapter, which training the adapter "
    "beside a quantized base does not see; put adapters on linears that stay in BF16, train full weights, or merge "
    "first (merge_and_unload())"
)
_BITS_PER_WEIGHT = 4 + 8 / BLOCK_SIZE


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def require_contract(contract: object) -> None:
    """Raise ContractError for anything that is not a Contract, a dictionary out of a config for example."""
    if not isinstance(contract, Contract):
        raise ContractError(
            f"contract: is {type(contract).__name__}, expected vllm_quads.nvfp4.Contract; from a dictionary make one "
            f"with Contract.from_dict"
        )


@dataclass(frozen=True)
class Weight:
    """One parameter that may be quantized: a 2-D weight, or a fused stack of experts [E, N, K]."""

    module: nn.Module
    attribute: str
    """Name of the parameter in its module."""
    parameter: str
    """Name of the parameter in the model."""
    name: str
    """Canonical name (of the stack, for a stack)."""
    matrices: dict[str, tuple[int, int]]
    """Canonical names and shapes (N, K) of the matrices it holds, in storage order."""
    problem: str | None
    """Why it cannot be fake-quantized, or None."""

    @property
    def tensor(self) -> Tensor:
        """The parameter itself."""
        value: Tensor = getattr(self.module, self.attribute)
        return value


def decoder_layers(model: nn.Module) -> int | None:
    """`num_hidden_layers` of a Hugging Face (text) model, which `keep_last_layers` counts from; None if unknown."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """Every 2-D weight and every expert parameter of the model, each once, in the order of its modules."""
    seen: set[int] = set()
    model = plain_model(model)
    adapters = Adapters.of(model)
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{attribute}" if path else attribute
            if id(parameter) in seen or parameter.dim() < 2 or adapters.adds(full):
                continue
            stacked = parameter.dim() == 3 and ".experts" in full
            if not stacked and (parameter.dim() != 2 or not attribute.endswith("weight")):
                continue  # convolutions, biases of expert stacks
            seen.add(id(parameter))
            weight = _stack(module, attribute, full) if stacked else _matrix(module, attribute, full)
            yield weight if adapters.owner(full) is None else replace(weight, problem=_ADAPTER)


def _matrix(module: nn.Module, attribute: str, parameter: str) -> Weight:
    name = canonical_name(Adapters.plain_name(parameter))
    shape = tuple(getattr(module, attribute).shape)
    problem = None
    if not isinstance(module, nn.Linear):
        problem = f"it belongs to a {type(module).__name__}, and QUADS fake-quantizes nn.Linear and fused experts"
    elif type(module).forward is not nn.Linear.forward:
        problem = f"{type(module).__name__} has a forward of its own, which need not use this parameter as it is"
    return Weight(module, attribute, parameter, name, {name: (shape[0], shape[1])}, problem)


def _stack(module: nn.Module, attribute: str, parameter: str) -> Weight:
    name = canonical_name(Adapters.plain_name(parameter))
    experts, n, k = getattr(module, attribute).shape
    problem = stack_problem(module)
    if not is_expert_stack(name):
        problem = f"{attribute!r} is not one of the fused expert weights that QUADS knows (gate_up_proj, down_proj)"
        return Weight(module, attribute, parameter, name, {name: (n, k)}, problem)
    names = expand(name, experts)
    rows = n * experts // len(names)
    return Weight(module, attribute, parameter, name, dict.fromkeys(names, (rows, k)), problem)


def stack_problem(module: nn.Module) -> str | None:
    """Why the fused experts of this module cannot be fake-quantized, or None."""
    kind = type(module).__name__
    if not hasattr(type(module).forward, "__wrapped__") or not hasattr(module, "is_transposed"):
        return f"{kind} does not run through transformers' experts interface (`use_experts_implementation`)"
    wrong = [
        text
        for text, bad in (
            ("stored transposed (K before N)", module.is_transposed),
            ("gate and up interleaved", not module.is_concatenated),
            ("with biases", module.has_bias),
            ("without a gate", not module.has_gate),
        )
        if bad
    ]
    if wrong:
        return f"{kind} keeps its experts {', '.join(wrong)}; QUADS knows [gate; up] rows first, without biases"
    return None


@dataclass(frozen=True)
class Inventory:
    """The parameters of a model under a contract."""

    contract: Contract
    quantized: QuantizedSet
    selected: list[Weight]
    """Parameters to be fake-quantized."""
    kept: dict[str, str]
    """Canonical name of every other weight (of the stack, for a stack) -> why it stays as it is."""
    bytes_bf16: int
    """BF16 bytes of the quantized weights."""
    bytes_packed: int
    """Their bytes in NVFP4: codes, block scales and global scales."""

    @staticmethod
    def of(model: nn.Module, contract: Contract) -> Inventory:
        """Resolve the contract over a model.

        Raises ContractError if it selects nothing, or something that cannot be quantized; names the first such weight.
        """
        weights = list(weights_of(model))
        shapes = {name: shape for w in weights for name, shape in w.matrices.items()}
        num_layers = decoder_layers(model)
        if num_layers is None:
            layers = [i for i in map(layer_index, shapes) if i is not None]
            num_layers = max(layers) + 1 if layers else None
        for weight in weights:
            if weight.problem and any(contract.selects(name, num_layers) for name in weight.matrices):
                kind = kind_of(weight.name)
                if kind in (Kind.EXPERT, Kind.LINEAR, Kind.OTHER):
                    raise ContractError(
                        f"{weight.name}: cannot be fake-quantized: {weight.problem}; add it to the contract's `ignore` "
                        f"to keep it in BF16 on both sides"
                    )
        quantized = contract.resolve(shapes, num_layers)
        selected: list[Weight] = []
        kept: dict[str, str] = {}
        for weight in weights:
            chosen = [name in quantized for name in weight.matrices]
            if all(chosen):
                if weight.tensor.dtype not in _DTYPES:  # FP8 is floating point, but means nothing without its scales
                    raise ContractError(
                        f"{weight.name}: is {weight.tensor.dtype}; QUADS trains BF16, FP16 or FP32 master weights, so "
                        f"load the model without a quantization of its own"
                    )
                selected.append(weight)
            elif any(chosen):
                odd = next(n for n, c in zip(weight.matrices, chosen, strict=True) if not c)
                raise ContractError(
                    f"{odd}: is kept in BF16 while other experts of the same stack are quantized; the experts of a "
                    f"layer are quantized together, so name them all or none in `targets` and `ignore`"
                )
            else:
                kept[weight.name] = _why_kept(weight.name, next(iter(weight.matrices)), contract, num_layers)
        elements = sum(n * k for n, k in quantized.shapes.values())
        packed = int(elements * _BITS_PER_WEIGHT / 8) + torch.float32.itemsize * len(quantized)
        return Inventory(contract, quantized, selected, kept, 2 * elements, packed)


def _why_kept(name: str, matrix: str, contract: Contract, num_layers: int | None) -> str:
    kind = kind_of(name)
    if kind in (Kind.ROUTER, Kind.EMBEDDING, Kind.LM_HEAD):
        return f"{kind.value}s are never quantized"
    if replace(contract, ignore=()).selects(matrix, num_layers):
        return "matches `ignore`"
    if replace(contract, ignore=(), keep_first_layers=0, keep_last_layers=0).selects(matrix, num_layers):
        return "in a layer that `keep_first_layers` or `keep_last_layers` keeps in BF16"
    return "no pattern of `targets` matches"
