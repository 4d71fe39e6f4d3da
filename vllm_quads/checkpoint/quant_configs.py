# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` of each format: reading it into (format, scheme, ignore list), and writing it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_quads.checkpoint.layouts import Format
from vllm_quads.checkpoint.patterns import describe, to_regex
from vllm_quads.checkpoint.reader import read_json
from vllm_quads.nvfp4.contract import QUANT_METHOD, Contract, QuantizedSet, Scheme
from vllm_quads.nvfp4.errors import CheckpointError, ContractError
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import Kind, canonical_name, kind_of

HF_QUANT_CONFIG = "hf_quant_config.json"
CT_FORMAT = "nvfp4-pack-quantized"
LINEAR = "Linear"
_READS = "QUADS reads `quads`, ModelOpt NVFP4 and compressed-tensors nvfp4-pack-quantized checkpoints, and BF16"


@dataclass(frozen=True)
class QuantConfig:
    """What the configuration files of a checkpoint say."""

    format: Format
    scheme: Scheme = Scheme.W4A4
    ignore: tuple[str, ...] = ()
    """Foreign ignore list (module patterns); empty for `quads`."""
    targets: tuple[str, ...] = (LINEAR,)
    """What a foreign format quantizes: the class `Linear`, or module patterns."""
    contract: Contract | None = None
    """The stored contract; only for `quads`."""


def read_quant_config(path: Path, config: Mapping[str, Any]) -> QuantConfig:
    """Read `quantization_config` and `hf_quant_config.json`. Raises CheckpointError for a scheme that is not NVFP4."""
    stored = {key: _object(path, config.get(key), key) for key in ("quantization_config", "compression_config")}
    data = stored["quantization_config"] or stored["compression_config"] or None
    hf = read_json(path / HF_QUANT_CONFIG) if (path / HF_QUANT_CONFIG).exists() else {}
    extra = _object(path, hf.get("quantization"), f"`quantization` of {HF_QUANT_CONFIG}") or None
    if data is None and extra is None:
        return QuantConfig(Format.BF16)
    method = "modelopt" if data is None else str(data.get("quant_method", ""))
    if method == QUANT_METHOD:
        contract = Contract.from_dict(data or {})
        return QuantConfig(Format.QUADS, contract.scheme, contract=contract)
    if method in ("modelopt", "modelopt_fp4") or (method == "" and "quant_algo" in (data or {})):
        return _modelopt(path, [d for d in (data, extra) if d is not None])
    if method == "compressed-tensors":
        return _compressed_tensors(path, data or {})
    raise CheckpointError(f"{path}: quant_method is {method!r}, which is not NVFP4; {_READS}")


def _object(path: Path, value: Any, what: str) -> Mapping[str, Any]:
    """A JSON object, empty for null."""
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: {what} is {value!r}, expected an object; restore the file")
    return value or {}


def _patterns(path: Path, value: Any, what: str) -> tuple[str, ...]:
    """A list of module patterns, empty for null."""
    if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        raise CheckpointError(f"{path}: {what} is {value!r}, expected a list of module patterns; restore the file")
    for pattern in value or ():
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as e:
            raise CheckpointError(f"{path}: {what} holds {pattern!r}, which is no regular expression ({e})") from e
    return tuple(value or ())


def _groups(path: Path, source: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = _object(path, source.get("config_groups"), "config_groups")
    return {name: _object(path, group, f"config_groups.{name}") for name, group in groups.items()}


def _weight_args(path: Path, name: str, group: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(path, group.get("weights"), f"config_groups.{name}.weights")


def _modelopt(path: Path, sources: list[Mapping[str, Any]]) -> QuantConfig:
    schemes, ignore = set(), set()
    for source in sources:
        algo = source.get("quant_algo")
        if algo not in ("NVFP4", "W4A16_NVFP4"):
            raise CheckpointError(f"{path}: ModelOpt quant_algo is {algo!r}, expected NVFP4 or W4A16_NVFP4; {_READS}")
        groups = _groups(path, source)
        sizes = [source.get("group_size"), *(_weight_args(path, n, g).get("group_size") for n, g in groups.items())]
        for size in sizes:
            if size not in (None, BLOCK_SIZE):
                raise CheckpointError(f"{path}: group_size is {size}, expected {BLOCK_SIZE} for NVFP4")
        weight_only = bool(groups) and all(g.get("input_activations") is None for g in groups.values())
        schemes.add(Scheme.W4A16 if algo == "W4A16_NVFP4" or weight_only else Scheme.W4A4)
        for key in ("exclude_modules", "ignore"):
            ignore |= {*_patterns(path, source.get(key), key)}
    if len(schemes) > 1:
        raise CheckpointError(f"{path}: config.json and {HF_QUANT_CONFIG} name different schemes; remove the stale one")
    return QuantConfig(Format.MODELOPT, schemes.pop(), tuple(sorted(ignore)))


def _compressed_tensors(path: Path, data: Mapping[str, Any]) -> QuantConfig:
    groups = _groups(path, data)
    if not groups:
        raise CheckpointError(f"{path}: compressed-tensors quantization_config has no config_groups; {_READS}")
    schemes = set()
    targets: list[str] = []
    for name, group in groups.items():
        targets += _patterns(path, group.get("targets"), f"config_groups.{name}.targets") or (LINEAR,)
        weights, style = _weight_args(path, name, group), group.get("format") or data.get("format")
        found = (style, weights.get("num_bits"), weights.get("type"), weights.get("group_size"))
        if found != (CT_FORMAT, 4, "float", BLOCK_SIZE):
            raise CheckpointError(
                f"{path}: {name} of the compressed-tensors quantization_config has (format, num_bits, type, "
                f"group_size) = {found}, expected {(CT_FORMAT, 4, 'float', BLOCK_SIZE)}; {_READS}"
            )
        schemes.add(Scheme.W4A16 if group.get("input_activations") is None else Scheme.W4A4)
    if len(schemes) > 1:
        raise CheckpointError(f"{path}: config_groups mix W4A4 and W4A16; QUADS needs one scheme for all layers")
    return QuantConfig(
        Format.COMPRESSED_TENSORS, schemes.pop(), _patterns(path, data.get("ignore"), "ignore"), tuple(targets)
    )


def contract_of(scheme: Scheme, weights: Iterable[str], quantized: QuantizedSet) -> Contract:
    """The contract that selects `quantized` among all 2-D `weights` (canonical names), by default options otherwise."""
    names, chosen = set(weights), set(quantized.shapes)
    if chosen == {n for n in names if kind_of(n) is Kind.EXPERT}:
        return Contract(scheme=scheme)
    targets = tuple(describe(chosen, names - chosen))
    matched = {n for n in names - chosen if any(fnmatch.fnmatchcase(n, t) for t in targets)}
    return Contract(scheme=scheme, targets=targets, ignore=tuple(describe(matched, chosen)))


# -- writing -------------------------------------------------------------------------------------------------------


def check_storable(contract: Contract, fmt: Format) -> None:
    """Raise ContractError for options that a foreign format has no place for (they would be lost silently)."""
    if fmt is Format.QUADS:
        return
    default = Contract()
    for option in ("activation", "compensation", "weight_global_scale"):
        if getattr(contract, option) != getattr(default, option):
            raise ContractError(
                f"{option}: the {fmt.value} format cannot store it; write the `quads` format, or give it when serving"
            )


def quantization_config(
    fmt: Format, contract: Contract, quantized: Iterable[str], unquantized: Iterable[str]
) -> dict[str, Any]:
    """`quantization_config` for config.json; the modules are on-disk names of those that have 2-D weights."""
    if fmt is Format.QUADS:
        return contract.to_dict()
    ignore = ignore_globs(quantized, unquantized)
    return _modelopt_config(contract, ignore) if fmt is Format.MODELOPT else _ct_config(contract, ignore)


def _modelopt_config(contract: Contract, ignore: list[str]) -> dict[str, Any]:
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    activations = None if contract.scheme is Scheme.W4A16 else args
    return {
        "quant_method": "modelopt",
        "quant_algo": modelopt_algo(contract.scheme),
        "config_groups": {"group_0": {"input_activations": activations, "weights": args, "targets": ["Linear"]}},
        "ignore": ignore,
        "producer": _producer(),
    }


def _ct_config(contract: Contract, ignore: list[str]) -> dict[str, Any]:
    args = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK_SIZE,
        "strategy": "tensor_group",
    }
    group = {
        "targets": ["Linear"],
        "weights": {**args, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"},
        "input_activations": None if contract.scheme is Scheme.W4A16 else {**args, "dynamic": "local"},
        "output_activations": None,
        "format": CT_FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": CT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [to_regex(g) for g in ignore],
    }


def hf_quant_config(contract: Contract, quantized: Iterable[str], unquantized: Iterable[str]) -> dict[str, Any]:
    """`hf_quant_config.json` of the ModelOpt format."""
    return {
        "producer": _producer(),
        "quantization": {
            "quant_algo": modelopt_algo(contract.scheme),
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": ignore_globs(quantized, unquantized),
        },
    }


def ignore_globs(quantized: Iterable[str], unquantized: Iterable[str]) -> list[str]:
    """Globs over on-disk module names of the linears that stay in BF16; lm_head is always among them."""
    rest = {"lm_head", *(m for m in unquantized if kind_of(canonical_name(m)) is not Kind.EMBEDDING)}
    return describe(rest, quantized)


def modelopt_algo(scheme: Scheme) -> str:
    """ModelOpt's name of a scheme."""
    return "NVFP4" if scheme is Scheme.W4A4 else "W4A16_NVFP4"


def _producer() -> dict[str, str]:
    from vllm_quads import __version__

    return {"name": "vllm-quads", "version": __version__}
