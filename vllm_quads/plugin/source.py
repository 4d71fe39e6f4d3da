# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself, as a contract: QUADS' own, ModelOpt NVFP4, compressed-tensors NVFP4, or BF16."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_quads.nvfp4.contract import EXPERTS, QUANT_METHOD, Contract
from vllm_quads.nvfp4.errors import ContractError
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import canonical_name

SUPPORTED = "a quads checkpoint, ModelOpt NVFP4, compressed-tensors nvfp4-pack-quantized, or unquantized BF16 weights"
ALL_LINEARS = (EXPERTS, "*_proj")
"""What ModelOpt and compressed-tensors mean by "all Linear layers", less what they ignore."""
_RUNTIME_OPTIONS = ("scheme", "activation", "compensation")
"""Options that do not change the stored weights."""


@dataclass(frozen=True)
class Source:
    """Where the weights come from."""

    format: str
    """`bf16`, `quads`, `modelopt` or `compressed-tensors`."""
    contract: Contract

    @property
    def packed(self) -> bool:
        """True if the checkpoint holds NVFP4 weights."""
        return self.format != "bf16"

    def with_options(self, options: Mapping[str, Any]) -> Contract:
        """The contract with the user's options merged in. Raises ContractError for options that a packed checkpoint has
        already decided."""
        fixed = [key for key in options if key not in _RUNTIME_OPTIONS]
        if self.packed and fixed:
            raise ContractError(
                f"{fixed[0]}: is fixed by this {self.format} checkpoint, whose weights are already quantized; only "
                f"{list(_RUNTIME_OPTIONS)} can change at load. Quantize the BF16 model with another contract instead"
            )
        return self.contract.merged(options)


def unquantized() -> Source:
    """A checkpoint without quantization config: quantized while it loads."""
    return Source("bf16", Contract())


def parse(config: Mapping[str, Any]) -> Source:
    """The source that a `quantization_config` (or `hf_quant_config.json`) describes.

    Raises ContractError naming the scheme if QUADS cannot serve it.
    """
    method = config.get("quant_method") or config.get("producer", {}).get("name") or ""
    if method == QUANT_METHOD:
        return Source("quads", Contract.from_dict(config))
    if method in ("modelopt", "modelopt_fp4"):
        return _modelopt(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    raise _unsupported(str(method) or "unknown")


def _modelopt(config: Mapping[str, Any]) -> Source:
    inner = config.get("quantization", config)
    algo = str(inner.get("quant_algo", "")).upper()
    schemes = {"NVFP4": "w4a4", "W4A16_NVFP4": "w4a16"}
    if algo not in schemes:
        raise _unsupported(f"ModelOpt {algo or 'without quant_algo'}")
    group = inner.get("group_size", BLOCK_SIZE)
    if group != BLOCK_SIZE:
        raise _unsupported(f"ModelOpt {algo} with group_size {group}")
    ignore = inner.get("exclude_modules", inner.get("ignore")) or []
    return Source("modelopt", _contract(schemes[algo], ALL_LINEARS, [_pattern(p) for p in ignore]))


def _compressed_tensors(config: Mapping[str, Any]) -> Source:
    groups = config.get("config_groups") or {}
    if not groups:
        raise _unsupported("compressed-tensors without config_groups")
    targets: list[str] = []
    schemes = set()
    for name, group in groups.items():
        weights = group.get("weights") or {}
        what = f"{group.get('format') or config.get('format')} ({weights.get('num_bits')} bits, group {name})"
        if (weights.get("num_bits"), weights.get("type"), weights.get("group_size")) != (4, "float", BLOCK_SIZE):
            raise _unsupported(f"compressed-tensors {what}")
        if str(group.get("format") or config.get("format")) != "nvfp4-pack-quantized":
            raise _unsupported(f"compressed-tensors {what}")
        schemes.add("w4a4" if group.get("input_activations") else "w4a16")
        for target in group.get("targets", ["Linear"]):
            targets += ALL_LINEARS if target == "Linear" else [_pattern(target)]
    if len(schemes) > 1:
        raise _unsupported("compressed-tensors with W4A4 and W4A16 groups in one model")
    ignore = [_pattern(p) for p in config.get("ignore") or []]
    return Source("compressed-tensors", _contract(schemes.pop(), tuple(dict.fromkeys(targets)), ignore))


def _contract(scheme: str, targets: tuple[str, ...], ignore: list[str]) -> Contract:
    return Contract.from_dict({"scheme": scheme, "targets": list(targets), "ignore": list(dict.fromkeys(ignore))})


def _pattern(entry: str) -> str:
    """A glob over canonical names from an ignore or target entry: a module name, a glob, or `re:` and a regex.

    A module that is named without its children (`model.layers.0.self_attn`) covers them.
    """
    if entry.startswith("re:"):
        return _regex_to_glob(entry)
    entry = entry.replace("block_sparse_moe", "mlp")
    leaf = entry.rpartition(".")[2]
    covers_children = leaf in ("self_attn", "mlp", "experts", "shared_expert", "shared_experts") or leaf.isdigit()
    return canonical_name(entry) + (".*" if covers_children else "")


def _regex_to_glob(entry: str) -> str:
    text = entry.removeprefix("re:")
    # compressed-tensors uses re.match: anchored at the start, open at the end.
    open_end = not text.endswith("$")
    text = text.removeprefix("^").removesuffix("$").replace(r"\.", ".").replace(".*", "*")
    if re.search(r"[\\^$+?{}\[\]|()]", text):
        raise ContractError(
            f"ignore: the regular expression {entry!r} has no equivalent among the glob patterns of a contract; write "
            f"the list with names, globs, or expressions that use only `.*` and `\\.`"
        )
    glob = canonical_name(text.replace("block_sparse_moe", "mlp"))
    return glob + ("*" if open_end and not glob.endswith("*") else "")


def _unsupported(scheme: str) -> ContractError:
    return ContractError(
        f"quantization 'quads' cannot serve a checkpoint quantized with {scheme}; it serves {SUPPORTED}"
    )
