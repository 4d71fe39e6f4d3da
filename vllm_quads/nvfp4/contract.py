# SPDX-License-Identifier: Apache-2.0
"""The contract: one object that says what is quantized and how.

It is stored in a checkpoint's `config.json` as `quantization_config` with `quant_method: "quads"`, travels with every
weight sync, and both trainer and rollout resolve their set of quantized tensors from it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from vllm_quads.nvfp4.errors import ContractError, MismatchError
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import (
    Kind,
    canonical_name,
    expand,
    group_members,
    is_expert_stack,
    kind_of,
    layer_index,
    scale_group,
)
from vllm_quads.nvfp4.reference import BlockScaleRule

QUANT_METHOD = "quads"
CONTRACT_VERSION = 1
EXPERTS = "*.experts.*"
"""Default target: the routed experts."""


class Scheme(str, Enum):
    """What is in NVFP4."""

    W4A4 = "w4a4"
    """Weights, and activations quantized online."""
    W4A16 = "w4a16"
    """Weights only (the trainer's view, and a baseline for the rollout)."""


class WeightGlobalScale(str, Enum):
    """Where a weight's global scale comes from at each optimizer step."""

    LIVE = "live"
    """amax of the current weight."""
    FROZEN = "frozen"
    """The scale that the base checkpoint was quantized with; later values saturate."""
    MOVING_AVERAGE = "moving_average"
    """Exponential moving average of the amax over optimizer steps; the trainer keeps it and sends the scales."""


class ActivationGlobalScale(str, Enum):
    """Where an activation's global scale comes from."""

    TOKEN = "token"
    """amax of the token's own row: independent of the batch."""
    STATIC = "static"
    """The checkpoint's input_scale."""


class Centering(str, Enum):
    """Static channel offset that is subtracted before quantizing and added back as a bias W @ offset."""

    NONE = "none"
    MEAN = "mean"
    MEDIAN = "median"


class Form(str, Enum):
    """In which form the residual of the activations is multiplied."""

    NONE = "none"
    """No compensation: plain W4A4."""
    BLOCKS = "blocks"
    """Selected 16-channel blocks are appended along K (within `ratio`), for every token."""
    ROWS = "rows"
    """The residual of all channels is a second row for the same expert, for every token."""
    AUTO = "auto"
    """Rows for decode tokens, blocks for prefill tokens (see `docs/rac.md` for the rule)."""


class Allocation(str, Enum):
    """How the block budget `ratio` is spread over layers."""

    UNIFORM = "uniform"
    """The same ratio for every linear."""
    BUDGET = "budget"
    """One budget over all linears, spent where output error times sensitivity is largest."""


@dataclass(frozen=True)
class Compensation:
    """Residual activation compensation (RAC)."""

    form: Form = Form.AUTO
    ratio: float = 0.25
    """Share of K (of all MACs with Allocation.BUDGET) that appended blocks may cover, 0 to 1."""
    allocation: Allocation = Allocation.BUDGET


@dataclass(frozen=True)
class Activation:
    """Online quantization of activations (ignored under Scheme.W4A16)."""

    global_scale: ActivationGlobalScale = ActivationGlobalScale.TOKEN
    block_scale_rule: BlockScaleRule = BlockScaleRule.FOUR_OVER_SIX
    centering: Centering = Centering.MEDIAN


_T = TypeVar("_T")


@dataclass(frozen=True)
class Contract:
    """What is quantized and how; immutable, comparable, and serialisable to JSON."""

    scheme: Scheme = Scheme.W4A4
    targets: tuple[str, ...] = (EXPERTS,)
    """Globs over canonical names (see `names`); a weight is quantized if one matches the whole name."""
    ignore: tuple[str, ...] = ()
    """Globs of weights kept in BF16 although a target matches."""
    keep_first_layers: int = 0
    """Decoder layers at the start that stay in BF16."""
    keep_last_layers: int = 0
    """Decoder layers at the end that stay in BF16; multi-token-prediction layers behind them always do."""
    weight_global_scale: WeightGlobalScale = WeightGlobalScale.LIVE
    activation: Activation = field(default_factory=Activation)
    compensation: Compensation = field(default_factory=Compensation)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ContractError("targets: is empty, so no tensor would be quantized; name at least one pattern")
        if not 0.0 <= self.compensation.ratio <= 1.0:
            raise ContractError(f"compensation.ratio: is {self.compensation.ratio}, expected 0 to 1")
        for name in ("keep_first_layers", "keep_last_layers"):
            if getattr(self, name) < 0:
                raise ContractError(f"{name}: is {getattr(self, name)}, expected 0 or more")

    # -- serialisation -------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary with `quant_method` and `version`, as stored in `config.json`."""
        return {"quant_method": QUANT_METHOD, "version": CONTRACT_VERSION, **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        """Parse and validate. Unknown keys, values and versions raise ContractError naming the option."""
        data = dict(data)
        method = data.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ContractError(f"quant_method: is {method!r}, expected {QUANT_METHOD!r}")
        version = data.pop("version", CONTRACT_VERSION)
        if version != CONTRACT_VERSION or isinstance(version, bool):
            raise ContractError(
                f"version: this contract has version {version!r}, this release reads version {CONTRACT_VERSION}; "
                f"install a matching vllm-quads or write the checkpoint again"
            )
        return _parse(cls, data, "")

    def merged(self, options: Mapping[str, Any]) -> Contract:
        """This contract with nested options replaced, for example {"compensation": {"ratio": 0.5}}."""
        return Contract.from_dict(_deep_merge(self.to_dict(), options))

    def digest(self) -> str:
        """16 hex digits that identify the contract."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    # -- the set of quantized tensors ----------------------------------------------------------------------------

    def selects(self, name: str, num_layers: int | None = None) -> bool:
        """True if the weight of this canonical name is to be quantized, going by names and layer index alone.

        num_layers: the model's `num_hidden_layers`. Layers from there on (multi-token prediction) are never selected.
        """
        name = canonical_name(name)
        layer = layer_index(name)
        if layer is not None and layer < self.keep_first_layers:
            return False
        if layer is not None and num_layers is not None and layer >= num_layers - self.keep_last_layers:
            return False
        return _matches(name, self.targets) and not _matches(name, self.ignore)

    def resolve(self, weights: Mapping[str, tuple[int, int]], num_layers: int | None = None) -> QuantizedSet:
        """The quantized tensors among `weights` (canonical name -> (N, K), all 2-D weights of the model).

        num_layers: the model's `num_hidden_layers`, which both sides have to count `keep_last_layers` from; None
        takes the highest layer index that occurs (right for a whole model without multi-token-prediction layers).

        Raises ContractError if nothing matches, if a router, lm_head or embedding matches, if K is not a multiple
        of 16, or if only a part of a fused group (gate/up, q/k/v) is selected. Warns about an ignore pattern that
        matches nothing.
        """
        if num_layers is None:
            layers = [i for i in map(layer_index, weights) if i is not None]
            num_layers = max(layers) + 1 if layers else None
        chosen = {n: s for n, s in weights.items() if self.selects(n, num_layers)}
        for name, (_, k) in chosen.items():
            self._check_quantizable(name, k)
        for pattern in self.ignore:
            if not any(fnmatch.fnmatchcase(n, pattern) for n in weights):
                warnings.warn(
                    f"ignore: pattern {pattern!r} matches no weight of this model; "
                    f"names look like {_example(weights)!r}",
                    stacklevel=2,
                )
        if not chosen:
            moe = any(kind_of(n) is Kind.EXPERT for n in weights)
            why = "" if moe else " The model has no routed experts: name its linears, for example '*.mlp.*_proj'."
            if any(_matches(n, self.targets) and not _matches(n, self.ignore) for n in weights):
                why = f" keep_first_layers and keep_last_layers keep all of its {num_layers} layers."
            elif any(_matches(n, self.targets) for n in weights):
                why = " `ignore` excludes all that they match."
            raise ContractError(
                f"targets: {list(self.targets)} select no weight of this model "
                f"(names look like {_example(weights)!r}).{why}"
            )
        for name in chosen:
            for sibling in group_members(scale_group(name)):
                if sibling in weights and sibling not in chosen:
                    raise ContractError(
                        f"{name} is quantized but {sibling} is not; the rollout multiplies with both as one "
                        f"matrix, so select both or neither"
                    )
        return QuantizedSet(dict(sorted(chosen.items())))

    @staticmethod
    def _check_quantizable(name: str, k: int) -> None:
        kind = kind_of(name)
        reasons = {
            Kind.ROUTER: "a rounded router sends tokens to other experts than the trainer's",
            Kind.LM_HEAD: "its error goes straight into the log-probs, and it may be tied to the embedding",
            Kind.EMBEDDING: "it is a table that no GEMM multiplies with",
        }
        article = "a" if kind is Kind.ROUTER else "an"
        if kind in reasons:
            raise ContractError(
                f"{name}: QUADS does not quantize {article} {kind.value} ({reasons[kind]}); "
                f"narrow `targets` or add it to `ignore`"
            )
        if name.endswith(".kv_b_proj"):
            raise ContractError(
                f"{name}: QUADS does not quantize it: vLLM absorbs it into multi-head latent attention, as a copy in "
                f"BF16 that W4A4 would not describe; add '*.kv_b_proj' to `ignore`"
            )
        parts = expand(name) if not is_expert_stack(name) else [name]
        if parts != [name]:
            raise ContractError(
                f"{name}: is {', '.join(p.rpartition('.')[2] for p in parts)} fused into one weight, which QUADS does "
                f"not quantize; save the model with one weight per projection, or add it to `ignore`"
            )
        if k % BLOCK_SIZE:
            raise ContractError(
                f"{name}: K = {k} is not a multiple of {BLOCK_SIZE}, the NVFP4 block size; add it to `ignore`"
            )


@dataclass(frozen=True)
class QuantizedSet:
    """The tensors that a contract quantizes in one model: canonical name -> (N, K), sorted by name."""

    shapes: dict[str, tuple[int, int]]

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def require_equal(self, other: QuantizedSet, mine: str = "trainer", theirs: str = "rollout") -> None:
        """Raise MismatchError naming the first tensor on which two resolved sets differ."""
        if self.shapes == other.shapes:
            return
        for name in sorted({*self.shapes, *other.shapes}):
            a, b = self.shapes.get(name), other.shapes.get(name)
            if a == b:
                continue
            if a is None or b is None:
                has, lacks = (theirs, mine) if a is None else (mine, theirs)
                detail = f"{name} is quantized by the {has} but not by the {lacks}"
            else:
                detail = f"{name} has shape {a} in the {mine} and {b} in the {theirs}"
            raise MismatchError(f"{mine} and {theirs} quantize different tensors: {detail}; use one contract for both")


def first_difference(a: Contract, b: Contract) -> str | None:
    """The first option in which two contracts differ, as `option: a != b`, or None."""
    left, right = _flatten(a.to_dict()), _flatten(b.to_dict())
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            return f"{key}: {left.get(key)!r} != {right.get(key)!r}"
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _example(weights: Mapping[str, tuple[int, int]]) -> str:
    """A name to show: of a weight that can be quantized, if there is one."""
    return next((n for n in weights if kind_of(n) in (Kind.EXPERT, Kind.LINEAR)), next(iter(weights), "(none)"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, Enum) else value


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _deep_merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = _deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _parse(cls: type[_T], data: Any, path: str) -> _T:
    """Build a dataclass from plain data; every error names the option by its dotted path."""
    if not isinstance(data, Mapping):
        raise ContractError(f"{path.rstrip('.') or 'contract'}: is {data!r}, expected an object")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}{key}"
        if key not in known:
            raise ContractError(f"{where}: unknown option; expected one of {sorted(known)}")
        kwargs[key] = _parse_value(known[key], value, where)
    return cls(**kwargs)


def _parse_value(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    factory: Any = spec.default_factory
    default = factory() if spec.default is dataclasses.MISSING else spec.default
    if dataclasses.is_dataclass(default):
        return _parse(type(default), value, f"{where}.")
    if isinstance(default, Enum):
        options = [e.value for e in type(default)]
        if value not in options:
            raise ContractError(f"{where}: is {value!r}, expected one of {options}")
        return type(default)(value)
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ContractError(f"{where}: is {value!r}, expected a list of patterns")
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, (int, float) if isinstance(default, float) else int):
        raise ContractError(
            f"{where}: is {value!r}, expected {'an integer' if isinstance(default, int) else 'a number'}"
        )
    return type(default)(value)
