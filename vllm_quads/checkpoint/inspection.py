# SPDX-License-Identifier: Apache-2.0
"""`inspect_checkpoint`: every packed weight of a checkpoint read and judged, summed up per layer and projection."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_quads.checkpoint.calibrated import missing_calibration, wants_calibration
from vllm_quads.checkpoint.disk_names import is_stack
from vllm_quads.checkpoint.headers import FLOATING, TensorHeader
from vllm_quads.checkpoint.info import CheckpointInfo, describe_reader
from vllm_quads.checkpoint.layouts import Format
from vllm_quads.checkpoint.load import read_input_scale, read_packed
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.checkpoint.verify import header_problems
from vllm_quads.compensation.state import CompensationState
from vllm_quads.nvfp4.errors import FormatError, QuadsError
from vllm_quads.nvfp4.fingerprint import fingerprint, packed_digest
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import canonical_name, expand, layer_index
from vllm_quads.nvfp4.packed import PackedTensor

_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")


@dataclass
class LayerSummary:
    """The weights of one projection of one layer; the experts of a layer count together."""

    name: str
    """Canonical name, with `*` for the number of the expert."""
    format: str
    """`nvfp4`, or the stored dtype."""
    matrices: int = 0
    parameters: int = 0
    bytes: int = 0
    blocks: int = 0
    saturated_blocks: int = 0
    """Blocks whose block scale is 448 (one per matrix or scale group is normal)."""
    zero_blocks: int = 0
    """Blocks that decode to zero."""
    decode_scale_min: float | None = None
    decode_scale_max: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes, scales included."""
        return 8 * self.bytes / self.parameters


@dataclass
class Inspection:
    """What `inspect_checkpoint` found."""

    path: str
    format: str
    contract: dict[str, Any] | None
    ignore: list[str]
    tied_embeddings: bool
    layers: list[LayerSummary] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    """Of the packed weights; None if the checkpoint is BF16 or has problems."""
    compensation: dict[str, Any] | None = None
    """Sites, share of blocks selected and fingerprint of a stored compensation state."""
    calibrated: bool | None = None
    """Whether channel sets and centring are there; None if the contract wants neither, or if they cannot be read."""
    calibration: str | None = None
    """What is missing for that, and what to do; None if nothing is."""
    total_bytes: int = 0

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        data = asdict(self)
        for row, layer in zip(data["layers"], self.layers, strict=True):
            row["bits_per_weight"] = layer.bits_per_weight
        return {"ok": self.ok, **data}


def inspect_checkpoint(path: str | Path, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Read a checkpoint whole: headers, every packed weight, NaN and Inf in the rest, and its compensation state.

    Problems inside of a readable checkpoint are collected in `problems`; a directory that cannot be read as a
    checkpoint at all raises CheckpointError or ContractError. `progress` is called with (tensors done, tensors).
    """
    with CheckpointReader(path) as reader:
        info = describe_reader(reader)
        report = Inspection(
            path=str(path),
            format=info.format.value,
            contract=None if info.contract is None else info.contract.to_dict(),
            ignore=list(info.ignore),
            tied_embeddings=info.tied_embeddings,
            problems=[str(p) for p in header_problems(reader, info)],
            total_bytes=reader.total_bytes,
        )
        rows: dict[str, LayerSummary] = {}
        digests: dict[str, int] = {}
        dtypes = {n: h.dtype for t, h in reader.headers.items() for n in _matrices(t, h)}
        others = _unpacked(reader, info)
        steps: list[Callable[[], None]] = [
            partial(_summarize, reader, info, name, dtypes.get(name, "U8"), rows, digests) for name in info.weights
        ]
        steps += [partial(_check_finite, reader, name) for name in others]
        for i, step in enumerate(steps):
            try:
                step()
            except QuadsError as e:
                if str(e) not in report.problems:
                    report.problems.append(str(e))
            if progress is not None:
                progress(i + 1, len(steps))
        report.layers = sorted(rows.values(), key=_order)
        _compensation(Path(path), info, report)
        if info.format is not Format.BF16 and report.ok:
            report.fingerprint = fingerprint(digests)
    return report


def _order(row: LayerSummary) -> tuple[int, str]:
    layer = layer_index(row.name)
    return (-1 if layer is None else layer, row.name)


def _matrices(tensor: str, header: TensorHeader) -> list[str]:
    return expand(tensor, header.shape[0]) if is_stack(tensor, len(header.shape)) else [canonical_name(tensor)]


def _unpacked(reader: CheckpointReader, info: CheckpointInfo) -> list[str]:
    """Floating tensors that are no part of a packed weight."""
    owned = {f"{m}.{s}" for m in info.modules.values() for s in info.layout.scales}
    return [n for n, h in reader.headers.items() if h.dtype in FLOATING and n not in owned]


def _check_finite(reader: CheckpointReader, name: str) -> None:
    bad = int((~torch.isfinite(reader.get(name))).sum())
    if bad:
        raise FormatError(f"{name}: {bad} values are NaN or Inf; the model has diverged or the file is damaged")


def _summarize(
    reader: CheckpointReader,
    info: CheckpointInfo,
    name: str,
    dtype: str,
    rows: dict[str, LayerSummary],
    digests: dict[str, int],
) -> None:
    key = _EXPERT_NUMBER.sub(".experts.*.", name)
    n, k = info.weights[name]
    if name not in info.modules:
        row = rows.setdefault(f"{key} {dtype}", LayerSummary(key, dtype.lower()))
        row.matrices += 1
        row.parameters += n * k
        row.bytes += n * k * {"F32": 4, "F64": 8}.get(dtype, 2)
        return
    packed = read_packed(reader, info, name, check=False)
    row = rows.setdefault(f"{key} nvfp4", LayerSummary(key, "nvfp4"))
    _count(row, packed)
    digests[name] = int(packed_digest(packed))
    packed.check_values()
    scale = read_input_scale(reader, info, name)
    if scale is not None and not (bool(torch.isfinite(scale)) and float(scale) > 0):
        tensor = f"{info.modules[name]}.{info.layout.input_scale}"
        raise FormatError(
            f"{tensor}: is {reader.get(tensor).item()}, expected a finite positive scale; calibrate again"
        )


def _count(row: LayerSummary, packed: PackedTensor) -> None:
    n, k = packed.shape
    scale = float(packed.decode_scale)
    row.matrices += 1
    row.parameters += n * k
    row.bytes += packed.nbytes
    row.blocks += n * k // BLOCK_SIZE
    row.saturated_blocks += packed.saturated_blocks()
    row.zero_blocks += packed.zero_blocks()
    row.decode_scale_min = scale if row.decode_scale_min is None else min(row.decode_scale_min, scale)
    row.decode_scale_max = scale if row.decode_scale_max is None else max(row.decode_scale_max, scale)


def _compensation(path: Path, info: CheckpointInfo, report: Inspection) -> None:
    try:
        state = CompensationState.load(path)
    except QuadsError as e:
        report.problems.append(str(e))
        return
    if wants_calibration(info.contract):
        report.calibration = missing_calibration(info.contract, state)
        report.calibrated = report.calibration is None
    if state is not None:
        chosen = sum(int(s.blocks.sum()) for s in state.sites.values())
        total = sum(s.blocks.numel() for s in state.sites.values())
        report.compensation = {
            "sites": len(state.sites),
            "selected_blocks": chosen,
            "blocks": total,
            "centred_sites": sum(bool(s.center.any()) for s in state.sites.values()),
            "fingerprint": state.fingerprint(),
        }
