# SPDX-License-Identifier: Apache-2.0
"""The model's weights as a checkpoint or an engine wants them: one parameter at a time, under checkpoint names.

Fused stacks of experts are split into one tensor per expert by transformers' own reverse mapping, so names are those
that `save_pretrained` writes (Mixtral's `block_sparse_moe.experts.N.w1` included). Sharded parameters (FSDP2) are
gathered one at a time; every rank has to iterate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer_qat.adapters import Adapters, plain_model, require_no_prompt_learning
from trainer_qat.inventory import Weight, decoder_layers, require_contract, weights_of
from trainer_qat.prepare import frozen_amax, is_hooked, is_prepared, state_of
from trainer_qat.quantizer import full_amax, shard_amax, shared_amax
from trainer_qat.ranks import Ranks, reshard
from trainer_qat.wire import Wire
from vllm_quads.checkpoint.disk_names import unstack
from vllm_quads.checkpoint.layouts import LAYOUTS, Format
from vllm_quads.nvfp4 import (
    BLOCK_SIZE,
    Contract,
    ContractError,
    MismatchError,
    PackedTensor,
    canonical_name,
    fingerprint,
    first_difference,
    packed_digest,
    scale_group,
    weight_amax,
)
from vllm_quads.refit import TensorSpec

_INNER_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Item:
    """One matrix or vector under its checkpoint name."""

    name: str
    """Name of a plain tensor, `...gate_proj.weight` for a quantized one too."""
    value: Tensor | PackedTensor
    """On the device of the model; quantized weights are packed if `quantized`, else BF16."""
    quantized: bool

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the `quads` format that stand for it."""
        if isinstance(self.value, PackedTensor):
            return LAYOUTS[Format.QUADS].tensors(self.name.removesuffix(".weight"), self.value)
        return {self.name: self.value}


class Payload:
    """The weights of a model under its contract."""

    def __init__(self, model: nn.Module, contract: Contract | None = None) -> None:
        """Resolve what is quantized; nothing is computed yet.

        contract: None takes that of a prepared model. Raises MismatchError if it is another one than the model trains
        with, ContractError if there is none or it does not fit, or config.tie_word_embeddings is not true to the model.
        """
        if contract is not None:
            require_contract(contract)
        self._given = model
        self.model = _unwrap(model)
        if is_prepared(model):
            state = state_of(model)
            difference = first_difference(state.contract, contract) if contract is not None else None
            if difference is not None:
                raise MismatchError(
                    f"the model trains with another contract than the one given: {difference}; "
                    f"leave out `contract`, or prepare the model with it"
                )
            self.contract, self.quantized = state.contract, state.quantized
        elif contract is None:
            raise ContractError("the model is not prepared and no contract is given: call prepare_qat, or pass one")
        else:
            shapes = {name: shape for w in weights_of(model) for name, shape in w.matrices.items()}
            self.contract, self.quantized = contract, contract.resolve(shapes, decoder_layers(self.model))
        self._renamed: dict[str, str | None] = {}
        self._plain_specs: dict[tuple[str, torch.Size, torch.dtype], dict[str, TensorSpec]] = {}
        self._held: dict[tuple[str, ...], list[str]] = {}
        self._wires: dict[str, Wire] = {}
        self._weights: dict[str, Weight] = {}
        self._groups: dict[str, list[Weight]] = {}
        self._adapters = Adapters.of(self.model)
        self._adapters.check_mergeable()
        for weight in weights_of(self.model):
            if next(iter(weight.matrices)) in self.quantized:
                if self._adapters.owner(weight.parameter) is not None:
                    raise ContractError(f"{weight.name}: is quantized, but {weight.problem}")
                if is_prepared(model) and not is_hooked(weight):
                    raise ContractError(
                        f"{weight.name}: the contract quantizes it, but the module that prepare_qat hooked is not "
                        f"there any more, so the trainer multiplies with the plain weight; replace modules "
                        f"before prepare_qat"
                    )
                self._weights[weight.parameter] = weight
                self._groups.setdefault(scale_group(weight.name), []).append(weight)
        self.frozen = frozen_amax(model)
        """Stack or weight -> amax float32 that its global scale is taken from, where that is not the weight's own."""
        _check_tying(self.model)

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded over ranks, so that all of them have to iterate."""
        # Asked of the modules too: between forward and backward a unit may hold its full parameters.
        return any(isinstance(m, FSDPModule) for m in self.model.modules()) or any(
            isinstance(p, DTensor) for p in self.model.parameters()
        )

    def reshard(self) -> None:
        """See `ranks.reshard`; before anything is gathered."""
        reshard(self._given)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that is sent, by its name in the model."""
        for name, parameter in self.model.named_parameters():
            if not self._adapters.adds(name):
                yield name, parameter

    def weight(self, name: str) -> Weight | None:
        """The quantized weight that a parameter is, or None."""
        return self._weights.get(name)

    def weights(self) -> Iterator[Weight]:
        """The quantized weights."""
        yield from self._weights.values()

    def wire(self, weight: Weight) -> Wire:
        """How a quantized weight travels in a refit."""
        wire = self._wires.get(weight.parameter)
        if wire is None or wire.shape != tuple(weight.tensor.shape):
            wire = self._wires[weight.parameter] = Wire(weight)
        return wire

    def missing(self, parameters: Sequence[str]) -> list[str]:
        """Quantized matrices that none of these parameters holds."""
        key = tuple(parameters)
        if key not in self._held:
            found = {name for parameter in key for name in self._weights[parameter].matrices}
            self._held = {key: sorted(set(self.quantized.shapes) - found)}
        return self._held[key]

    def plain_specs(self, name: str, tensor: Tensor) -> dict[str, TensorSpec]:
        """Checkpoint names, shapes and dtypes of a parameter or buffer that is not quantized."""
        key = (name, tensor.shape, tensor.dtype)
        if key not in self._plain_specs:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._plain_specs[key] = {
                disk: TensorSpec(tuple(t.shape), t.dtype) for disk, t in self.named(name, meta).items()
            }
        return self._plain_specs[key]

    @property
    def merges(self) -> bool:
        """True if the model carries adapters, whose `updates` are added."""
        return bool(self._adapters.layers)

    def updates(self, name: str) -> list[Tensor]:
        """What adapters add to a parameter. A collective if they are sharded."""
        return self._adapters.updates(name)

    def merged(self, full: Tensor, updates: list[Tensor]) -> Tensor:
        """A whole parameter, with what adapters add to it."""
        return self._adapters.merged(full, updates)

    @torch.no_grad()  # around each step: a `with` would stay in force in the caller while the iterator waits
    def items(self, *, packed: bool = True, quantized_only: bool = False) -> Iterator[Item]:
        """Every weight, layer by layer; with packed=False quantized weights come as BF16.

        Of a sharded model an error that is this rank's own is raised at the end, for the others gather on.
        """
        self.reshard()
        ranks = Ranks.of(self.model)
        error: Exception | None = None
        sent = [(n, p, False) for n, p in self.parameters() if n in self._weights or not quantized_only]
        sent += [] if quantized_only else [(n, b, True) for n, b in self.buffers()]
        for name, tensor, is_buffer in sent:
            weight = self._weights.get(name)
            with ranks.collective(name):
                full = full_tensor(tensor)
                updates = [] if is_buffer else self.updates(name)
                shared = self._shards_amax(weight) if packed else []
            try:
                if error is not None:
                    continue
                if is_buffer:
                    yield from (Item(disk, t.contiguous(), False) for disk, t in self.convert(name, full).items())
                else:
                    yield from self._parameter_items(name, weight, self.merged(full, updates), packed, shared)
            except Exception as e:
                if not ranks.sharded:
                    raise
                error = e
        if error is not None:
            raise error

    def _parameter_items(
        self, name: str, weight: Weight | None, full: Tensor, packed: bool, shared: list[Tensor]
    ) -> Iterator[Item]:
        """What `items` gives of one parameter; shared: see `_shards_amax`."""
        amax = self._amax(weight, full, shared) if weight is not None and packed else {}
        for disk, tensor in self.convert(name, full).items():
            canonical = canonical_name(disk)
            if canonical not in self.quantized:
                yield Item(disk, _plain(tensor), False)
            elif packed:
                value = PackedTensor.quantize(tensor, amax=amax[scale_group(canonical)], name=canonical)
                yield Item(disk, value, True)
            else:
                yield Item(disk, tensor.to(torch.bfloat16).contiguous(), True)

    def specs(self, *, packed: bool = True) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor that `items` will give, by name; computes and gathers nothing.

        Raises MismatchError if the model's checkpoint layout does not hold all quantized matrices one by one.
        """
        specs: dict[str, TensorSpec] = {}
        found = set()
        for name, parameter in self.model.named_parameters():
            if self._adapters.adds(name):
                continue
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for disk, tensor in self.convert(name, meta).items():
                canonical = canonical_name(disk)
                shape = tuple(tensor.shape)
                if canonical not in self.quantized:
                    specs[disk] = TensorSpec(shape, _plain(tensor).dtype)
                    continue
                found.add(canonical)
                if shape != self.quantized.shapes[canonical]:
                    raise MismatchError(
                        f"{disk}: has shape {shape} in a checkpoint, but {self.quantized.shapes[canonical]} was "
                        f"quantized; this model family is not supported"
                    )
                specs |= _packed_specs(disk, shape) if packed else {disk: TensorSpec(shape, torch.bfloat16)}
        missing = sorted(set(self.quantized.shapes) - found)
        if missing:
            raise MismatchError(
                f"{missing[0]}: is quantized, but transformers does not save it as a tensor of its own "
                f"({len(missing)} such matrices); this model family is not supported"
            )
        for name, buffer in self.buffers():
            meta = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
            specs |= {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.convert(name, meta).items()}
        return specs

    def fingerprint(self) -> str:
        """Fingerprint of the packed weights; quantizes all of them once and keeps none."""
        digests: dict[str, int] = {}
        for item in self.items(quantized_only=True):
            assert isinstance(item.value, PackedTensor)
            digests[canonical_name(item.name)] = int(packed_digest(item.value))
        return fingerprint(digests)

    def _shards_amax(self, weight: Weight | None) -> list[Tensor]:
        """Of a sharded matrix: max |W|, a scalar, not rounded, of each weight that shares its scale. A collective."""
        if weight is None or not isinstance(weight.tensor, DTensor) or weight.tensor.dim() == 3:
            return []
        group = [] if weight.name in self.frozen else self._groups[scale_group(next(iter(weight.matrices)))]
        return [full_tensor(shard_amax(w.tensor)) for w in group]

    def _amax(self, weight: Weight, full: Tensor, shared: list[Tensor]) -> dict[str, Tensor]:
        """amax, float32 scalar, of each scale group that has a matrix in this parameter; shared: see `_shards_amax`."""
        groups = list(dict.fromkeys(scale_group(name) for name in weight.matrices))
        if full.dim() == 3:
            amax = self.frozen.get(weight.name)
            amax = full_amax(full, weight.name) if amax is None else amax.to(full.device)
            return dict(zip(groups, amax.unbind(), strict=True))
        frozen = self.frozen.get(weight.name)
        if frozen is not None:
            return {groups[0]: frozen.to(full.device)}
        if shared:
            return {groups[0]: torch.stack([weight_amax(a[None, None], weight.name) for a in shared]).amax(dim=0)}
        return {groups[0]: shared_amax([w.tensor for w in self._groups[groups[0]]], weight.name)}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a state dict holds."""
        for path, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, buffer

    def named(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """`convert`, which takes a millisecond, but remembered for parameters that are only renamed."""
        if name not in self._renamed:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            converted = self.convert(name, meta)
            disk, result = next(iter(converted.items()))
            self._renamed[name] = disk if len(converted) == 1 and result is meta else None
        new = self._renamed[name]
        return self.convert(name, tensor) if new is None else {new: tensor}

    def is_kept(self, name: str, tensor: Tensor) -> bool:
        """True if a parameter is only renamed; False if tensors are made of it, as of experts that a checkpoint has one
        by one."""
        if name not in self._renamed:
            self.plain_specs(name, tensor)
        return self._renamed[name] is not None

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Checkpoint names and tensors of one parameter."""
        name = Adapters.plain_name(_INNER_WRAPPERS.sub("", name))
        if not hasattr(self.model, "save_pretrained"):
            return {f"{n}.weight": t for n, t in unstack(name, tensor)} if tensor.dim() == 3 else {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        return cast(dict[str, Tensor], revert_weight_conversion(self.model, {name: tensor}))


def _unwrap(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside of torch.compile, DistributedDataParallel and PEFT (not of a learned prompt)."""
    require_no_prompt_learning(model)
    if plain_model(model) is not model:
        return _unwrap(plain_model(model))
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module):
            return _unwrap(inner)
    return model


def _check_tying(model: nn.Module) -> None:
    """An engine goes by the config: it ignores an lm_head that is said to be tied, and misses one that is not."""
    get_input, get_output = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    said = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    head = get_output() if callable(get_output) else None
    table = get_input() if callable(get_input) else None
    if said is None or getattr(head, "weight", None) is None or getattr(table, "weight", None) is None:
        return
    tied = head.weight is table.weight  # type: ignore[union-attr]
    if tied is not bool(said):
        raise ContractError(
            f"tie_word_embeddings: is {said} in the model's config, but lm_head and the embedding are "
            f"{'one weight' if tied else 'two weights'}; set model.config.tie_word_embeddings = {tied}"
        )


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective of all ranks if it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """FP32 master weights are served in BF16; other dtypes stay."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to(plain_dtype(tensor.dtype)).contiguous()


def _packed_specs(disk: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    n, k = shape
    layout, module = LAYOUTS[Format.QUADS], disk.removesuffix(".weight")
    return {
        f"{module}.{layout.codes}": TensorSpec((n, k // 2), torch.uint8),
        f"{module}.{layout.block_scales}": TensorSpec((n, k // BLOCK_SIZE), torch.float8_e4m3fn),
        f"{module}.{layout.global_scale}": TensorSpec(layout.scale_shapes[0], torch.float32),
    }
