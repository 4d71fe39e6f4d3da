# SPDX-License-Identifier: Apache-2.0
"""What tensors a loaded vLLM model takes, under canonical names; and where each tensor of a push belongs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_quads.nvfp4 import BLOCK_SIZE, RefitError, canonical_name, expand, unit_of
from vllm_quads.nvfp4.names import is_expert_stack
from vllm_quads.plugin import compat
from vllm_quads.plugin.config import QuadsConfig, expert_shapes
from vllm_quads.plugin.flags import Flags
from vllm_quads.plugin.linear import full_rows
from vllm_quads.plugin.parameters import FLOATS, Role
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.plugin.units import Unit, units_of
from vllm_quads.refit import TensorSpec

_SUFFIXES = (*(role.value for role in Role), "bias")
_FIELDS = {
    Role.WEIGHT_PACKED.value: "codes",
    Role.BLOCK_SCALE.value: "scales",
    Role.DECODE_SCALE.value: "global",
    Role.ENCODE_SCALE.value: "global",
    Role.INPUT_SCALE.value: "input",
    Role.INPUT_ENCODE_SCALE.value: "input",
}
_ENCODE = (Role.ENCODE_SCALE.value, Role.INPUT_ENCODE_SCALE.value)
_WORDS = {"codes": "codes", "scales": "block scales", "global": "global scale"}


@dataclass(frozen=True)
class TensorName:
    """A checkpoint tensor name, taken apart."""

    module: str
    """Canonical module name."""
    suffix: str
    """`weight`, a scale suffix, `bias`, or empty for a bare parameter."""

    @staticmethod
    def parse(name: str) -> TensorName:
        head, _, leaf = name.rpartition(".")
        if leaf in _SUFFIXES and head:
            return TensorName(canonical_name(head), leaf)
        return TensorName(canonical_name(name), "")

    def __str__(self) -> str:
        return f"{self.module}.{self.suffix}" if self.suffix else self.module


@dataclass(frozen=True)
class Slot:
    """Where a tensor of a quantized weight goes on this rank."""

    unit: Unit
    section: int
    field: str
    """`float`, `codes`, `scales`, `global` or `input`."""
    index: tuple[int, int] | None
    """Matrix within the section; None for a stack, which is all of it."""
    encode: bool
    """True for a scale in encode direction."""


@dataclass(frozen=True)
class Plan:
    """Where every tensor of a push goes; tensors for other ranks are in neither mapping."""

    slots: Mapping[str, Slot]
    plain: Mapping[str, tuple[str, ...]]
    """Tensor name -> keys of the parameters in `Inventory.owners` that it changes."""


class Inventory:
    """The tensors of a model. Built once per engine; the parameters of quantized weights never move."""

    def __init__(self, model: nn.Module, config: QuadsConfig) -> None:
        """Walk the model. Tied weights are listed once, under the name of the embedding."""
        self._model = weakref.ref(model)
        self._config = config
        assert config.quantized is not None
        self.quantized = config.quantized.shapes
        """Canonical name -> (N, K) of each quantized matrix, of all ranks."""
        self.units = [unit for key, runtime in config.runtimes.items() for unit in units_of(key, runtime)]
        self._unit = {unit.name: unit for unit in self.units}
        self._places = {
            m.name: (unit, s, (i // section.lead[1], i % section.lead[1]))
            for unit in self.units
            for s, section in enumerate(unit.sections)
            for i, m in enumerate(section.matrices)
        }
        self._members: dict[str, list[str]] = {}
        for name in self.quantized:
            self._members.setdefault(unit_of(name), []).append(name)
        self.plain: dict[str, tuple[int, ...]] = {}
        """Tensor name -> shape of everything else."""
        self.owners: dict[str, nn.Parameter] = {}
        """The parameter that each of them is loaded into."""
        self._rearranged: dict[str, str] = {}
        self._found: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]] = []
        """Every parameter of the model, where it was found."""
        self._planned: tuple[dict[str, TensorSpec], Plan] | None = None
        self._walk(model)

    def _walk(self, model: nn.Module) -> None:
        """Find what is not quantized."""
        for known in (self.plain, self.owners, self._rearranged, self._found):
            known.clear()
        self._planned = None
        seen: set[int] = set()
        for name, module in model.named_modules():
            own = getattr(module, "quads", None)
            for leaf, param in module.named_parameters(recurse=False):
                self._found.append((weakref.ref(module), leaf, param))
                if id(param) in seen or (isinstance(own, LayerRuntime) and leaf != "bias"):
                    continue
                if leaf in compat.ABSORBED and hasattr(module, "kv_b_proj"):
                    continue
                seen.add(id(param))
                tensors = _plain(name, module, leaf, tuple(param.shape))
                kernels = compat.rearranged_for(module) if isinstance(module, RoutedExperts) else None
                if kernels is not None:
                    self._rearranged |= dict.fromkeys(tensors, kernels)
                self.plain |= tensors
                self.owners |= dict.fromkeys(tensors, param)

    def _look_again(self) -> None:
        """Parameters may have been replaced by others since: by a reload that did not end, or by somebody else."""
        self._config.reloads.end()
        model = self._model()
        there = ((ref(), leaf, param) for ref, leaf, param in self._found)
        if model is not None and any(m is None or m._parameters.get(leaf) is not param for m, leaf, param in there):
            self._walk(model)

    def plan(self, tensors: Mapping[str, TensorSpec]) -> Plan:
        """Where each tensor goes.

        Raises RefitError for the first one that is unknown, of a wrong shape or dtype, sent twice, or missing, and for
        a layer that is sent in more than one form.
        """
        self._look_again()
        if self._planned is None or self._planned[0] != tensors:  # pushes are alike, one after another
            self._planned = dict(tensors), self._new_plan(tensors)
        return self._planned[1]

    def _new_plan(self, tensors: Mapping[str, TensorSpec]) -> Plan:
        slots: dict[str, Slot] = {}
        plain: dict[str, tuple[str, ...]] = {}
        arrived: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for name, spec in tensors.items():
            item = TensorName.parse(name)
            key = str(item) if item.suffix != "weight" or not is_expert_stack(item.module) else item.module
            if key in seen:
                raise RefitError(f"{name}: is sent twice (as {key}); send every tensor once")
            seen.add(key)
            if item.suffix != "bias" and (item.module in self._members and is_expert_stack(item.module)):
                field = self._stack_field(name, item, spec)
                arrived.setdefault(item.module, {})[field] = name
                unit = self._unit.get(item.module)
                if unit is not None:
                    slots[name] = Slot(unit, 0, field, None, item.suffix in _ENCODE)
            elif item.suffix != "bias" and item.module in self.quantized:
                field = self._matrix_field(name, item, spec)
                arrived.setdefault(item.module, {})[field] = name
                place = self._places.get(item.module)
                if place is not None:
                    slots[name] = Slot(place[0], place[1], field, place[2], item.suffix in _ENCODE)
            else:
                plain[name] = self._plain_keys(name, item, spec)
                seen.update(plain[name])
        self._check_complete(arrived, seen)
        return Plan(slots, plain)

    def watch_written(self, status: Tensor, flags: Flags) -> None:
        """Look for damage that was found in the units, int32 [units], while they were written."""
        names = [unit.name for unit in self.units]
        flags.add("bad scale", status, lambda i: f"{names[i]}.weight_scale: holds NaN or negative block scales")
        flags.add("bad global", status, lambda i: f"{names[i]}.weight_scale_2: expected finite, positive scales")

    # -- quantized weights ---------------------------------------------------------------------------------------

    def _stack_field(self, name: str, item: TensorName, spec: TensorSpec) -> str:
        members = self._members[item.module]
        experts = len(members) // len(expand(item.module, 1))
        parts = len(members) // experts
        n, k = self.quantized[members[0]]
        field = _field(name, item, spec)
        if item.suffix == Role.WEIGHT_PACKED.value or item.suffix in _ENCODE or field == "input":
            raise RefitError(
                f"{name}: stacks of experts are sent as `.weight`, `.weight_scale` and `.weight_scale_2`; send "
                f"`.{item.suffix}` expert by expert"
            )
        columns = {"float": k, "codes": k // 2, "scales": k // BLOCK_SIZE}
        if field == "global":
            _require(name, spec.shape, ((experts, parts),) if parts > 1 else ((experts,), (experts, 1)))
        else:
            _require(name, spec.shape, ((experts, parts * n, columns[field]),))
        return field

    def _matrix_field(self, name: str, item: TensorName, spec: TensorSpec) -> str:
        n, k = self.quantized[item.module]
        field = _field(name, item, spec)
        shapes = {"float": (n, k), "codes": (n, k // 2), "scales": (n, k // BLOCK_SIZE)}
        _require(name, spec.shape, (shapes[field],) if field in shapes else ((), (1,)))
        return field

    def _check_complete(self, arrived: Mapping[str, Mapping[str, str]], seen: set[str]) -> None:
        for unit, members in self._members.items():
            forms: dict[str, str] = {}
            for name in [unit] if unit in arrived else members:
                fields = arrived.get(name, {})
                packed = [f for f in ("codes", "scales", "global") if f in fields]
                if "float" not in fields and len(packed) < 3:
                    lacking = next(f for f in ("codes", "scales", "global") if f not in packed)
                    what = _WORDS[lacking] if packed else "weight"
                    raise RefitError(f"{name}: its {what} is missing from the push; a refit sends every weight")
                if "float" in fields and packed:
                    raise RefitError(f"{name}: is sent twice, as {fields['float']} and as {fields[packed[0]]}")
                forms.setdefault("float" if "float" in fields else "packed", next(iter(fields.values())))
            extra = next((m for m in members if m in arrived and m != unit), None) if unit in arrived else None
            if extra is not None:
                raise RefitError(f"{extra}: is sent twice, alone and in the stack {unit}")
            if len(forms) > 1:
                raise RefitError(
                    f"{forms['float']} is sent as a float weight but {forms['packed']} is packed; send all matrices of "
                    f"{unit} in one form"
                )
        for name in self.plain:
            if name not in seen:
                raise RefitError(f"{name}: is missing from the push; a refit sends every weight")

    # -- everything else -----------------------------------------------------------------------------------------

    def _plain_keys(self, name: str, item: TensorName, spec: TensorSpec) -> tuple[str, ...]:
        keys = []
        for key, shape in _matrices(item, spec):
            # A tied lm_head may be sent under its own name too: the loader knows what to do with it.
            owner = "model.embed_tokens.weight" if key == "lm_head.weight" and key not in self.plain else key
            expected = self.plain.get(owner)
            if expected is None:
                raise RefitError(
                    f"{name}: the engine has no such tensor; is the trainer's model the one that this engine serves?"
                )
            if spec.dtype not in FLOATS:
                raise RefitError(
                    f"{name}: is {spec.dtype}, but this weight is not quantized: expected BF16, FP16 or FP32"
                )
            _require(name, shape, (expected,))
            if key in self._rearranged:
                raise RefitError(
                    f"{name}: these experts stay in BF16, and vLLM has rearranged them for its {self._rearranged[key]} "
                    f"kernels, where a refit does not reach them; quantize them as well, or (on a GPU) start with "
                    f"moe_backend='triton'"
                )
            keys.append(key)
        return tuple(k for k in keys if k in self.owners)


def _matrices(item: TensorName, spec: TensorSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Key and shape of every checkpoint tensor that a plain tensor stands for: of each matrix, for a stack."""
    if not (is_expert_stack(item.module) and len(spec.shape) == 3):
        yield str(item), spec.shape
        return
    modules = expand(item.module, spec.shape[0])
    per_expert = len(modules) // spec.shape[0]
    for module in modules:
        yield f"{module}.weight", (spec.shape[1] // per_expert, spec.shape[2])


def _field(name: str, item: TensorName, spec: TensorSpec) -> str:
    """Which field of a quantized weight a tensor is. Raises RefitError for a dtype that does not fit its name."""
    dtype = str(spec.dtype)
    if item.suffix in ("weight", "") and spec.dtype in FLOATS:
        return "float"
    if item.suffix in ("weight", "", Role.WEIGHT_PACKED.value):
        if dtype != "torch.uint8":
            raise RefitError(f"{name}: is {dtype}, expected packed codes (torch.uint8) or a BF16/FP16/FP32 weight")
        return "codes"
    expected = "torch.float8_e4m3fn" if item.suffix == Role.BLOCK_SCALE.value else "torch.float32"
    if dtype != expected:
        raise RefitError(f"{name}: is {dtype}, expected {expected}")
    return _FIELDS[item.suffix]


def _require(name: str, shape: tuple[int, ...], allowed: tuple[tuple[int, ...], ...]) -> None:
    if tuple(shape) not in allowed:
        raise RefitError(f"{name}: has shape {tuple(shape)}, expected {allowed[0]}")


def _plain(name: str, module: nn.Module, leaf: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors, whole, that one parameter is loaded from."""
    if isinstance(module, VocabParallelEmbedding) and leaf == "weight":
        return {f"{canonical_name(name)}.weight": (module.org_vocab_size, module.embedding_dim)}
    if isinstance(module, RoutedExperts) and leaf in ("w13_weight", "w2_weight"):
        leaves = ("gate_proj", "up_proj") if leaf == "w13_weight" else ("down_proj",)
        shapes = expert_shapes(module, name)
        return {f"{n}.weight": s for n, s in shapes.items() if n.endswith(leaves)}
    if isinstance(module, LinearBase) and leaf in ("weight", "bias"):
        parts = expand(name)
        rows = full_rows(module, [module.output_size])
        if len(parts) == len(rows):
            tail = (module.input_size,) if leaf == "weight" else ()
            return {f"{part}.{leaf}": (n, *tail) for part, n in zip(parts, rows, strict=True)}
    return {str(TensorName.parse(f"{name}.{leaf}" if name else leaf)): shape}
