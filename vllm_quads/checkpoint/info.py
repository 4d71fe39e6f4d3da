# SPDX-License-Identifier: Apache-2.0
"""`detect`: what a checkpoint directory holds, from its configuration and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_quads.checkpoint.disk_names import config_value, is_stack
from vllm_quads.checkpoint.headers import FLOATING
from vllm_quads.checkpoint.layouts import LAYOUTS, Format, Layout
from vllm_quads.checkpoint.quant_configs import contract_of, read_quant_config
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.nvfp4.contract import Contract, QuantizedSet, Scheme
from vllm_quads.nvfp4.errors import CheckpointError
from vllm_quads.nvfp4.names import canonical_name, expand


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds."""

    path: Path
    format: Format
    scheme: Scheme | None
    """None for BF16."""
    contract: Contract | None
    """The stored contract (`quads`), or the equivalent one of a foreign format; None for BF16."""
    ignore: tuple[str, ...]
    """Ignore list of a foreign format, as stored."""
    targets: tuple[str, ...]
    """What a foreign format quantizes: the class `Linear`, or module patterns."""
    quantized: QuantizedSet
    """The packed weights that the shards hold."""
    weights: Mapping[str, tuple[int, int]]
    """(N, K) of every 2-D weight, packed or not, by canonical name; fused stacks count as their matrices."""
    modules: Mapping[str, str]
    """On-disk module name of each packed weight, by canonical name."""
    config: Mapping[str, Any]
    """The model's config.json."""

    @property
    def num_layers(self) -> int | None:
        """`num_hidden_layers` of config.json, without multi-token-prediction layers; None if it does not say."""
        count = config_value(self.config, "num_hidden_layers")
        return count if isinstance(count, int) and not isinstance(count, bool) else None

    @property
    def layout(self) -> Layout:
        """Tensor names of this checkpoint's packed weights. Raises CheckpointError for BF16."""
        if self.format is Format.BF16:
            raise CheckpointError(f"{self.path}: is not quantized; run `quads quantize` first")
        return LAYOUTS[self.format]

    @property
    def tied_embeddings(self) -> bool:
        """True if lm_head is the embedding."""
        return bool(config_value(self.config, "tie_word_embeddings"))


def detect(path: str | Path) -> CheckpointInfo:
    """Format, contract and quantized set of a checkpoint directory, from configuration and headers.

    Raises CheckpointError for a directory that is no checkpoint, is truncated, or has a scheme that is not NVFP4;
    ContractError for a contract that does not parse. `verify_headers` checks the rest.
    """
    with CheckpointReader(path) as reader:
        return describe_reader(reader)


def describe_reader(reader: CheckpointReader) -> CheckpointInfo:
    """`detect` for an open reader."""
    stored = read_quant_config(reader.path, reader.config)
    layouts = [LAYOUTS[stored.format]] if stored.format in LAYOUTS else list(LAYOUTS.values())
    modules: dict[str, str] = {}
    packed: dict[str, tuple[int, int]] = {}
    weights: dict[str, tuple[int, int]] = {}
    for name, header in reader.headers.items():
        codes = next((s.codes for s in layouts if name.endswith("." + s.codes)), None)
        if codes is not None and header.dtype == "U8" and len(header.shape) == 2:
            module = name.removesuffix("." + codes)
            packed[canonical_name(module)] = (header.shape[0], 2 * header.shape[1])
            modules[canonical_name(module)] = module
        elif header.dtype in FLOATING and len(header.shape) == 2 and name.endswith(".weight"):
            weights[canonical_name(name)] = (header.shape[0], header.shape[1])
        elif header.dtype in FLOATING and is_stack(name, len(header.shape)) and header.shape[0]:
            experts, rows, k = header.shape
            names = expand(name, experts)
            weights |= dict.fromkeys(names, (rows * experts // len(names), k))
    if stored.format is Format.BF16 and packed:
        raise CheckpointError(
            f"{reader.path}: holds packed weights ({next(iter(modules.values()))}), but config.json has no "
            f"quantization_config and there is no hf_quant_config.json; restore the missing file"
        )
    quantized = QuantizedSet(dict(sorted(packed.items())))
    weights |= packed
    contract = stored.contract
    if contract is None and stored.format is not Format.BF16 and packed:
        contract = contract_of(stored.scheme, weights, quantized)
    return CheckpointInfo(
        path=reader.path,
        format=stored.format,
        scheme=None if stored.format is Format.BF16 else stored.scheme,
        contract=contract,
        ignore=stored.ignore,
        targets=stored.targets,
        quantized=quantized,
        weights=weights,
        modules=modules,
        config=reader.config,
    )
