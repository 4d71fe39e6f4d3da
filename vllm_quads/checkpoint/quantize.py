# SPDX-License-Identifier: Apache-2.0
"""`quantize_checkpoint`: a BF16 checkpoint to NVFP4, one scale group at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_quads.checkpoint.disk_names import check_stack, is_stack, unstack
from vllm_quads.checkpoint.info import CheckpointInfo, describe_reader
from vllm_quads.checkpoint.layouts import Format
from vllm_quads.checkpoint.quant_configs import check_storable
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.checkpoint.verify import header_problems
from vllm_quads.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter, require_free
from vllm_quads.compensation.state import CompensationState
from vllm_quads.nvfp4.contract import ActivationGlobalScale, Contract, QuantizedSet, Scheme
from vllm_quads.nvfp4.errors import CheckpointError, ContractError, FormatError
from vllm_quads.nvfp4.names import canonical_name, expand, group_members, scale_group
from vllm_quads.nvfp4.packed import PackedTensor
from vllm_quads.nvfp4.reference import weight_amax

Progress = Callable[[int, int, str], None]
"""Called with (bytes of the source done, bytes in total, name of the tensor)."""


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_checkpoint` did."""

    path: str
    format: str
    fingerprint: str
    quantized: int
    """Weights in NVFP4."""
    kept: int
    """2-D weights kept as they were."""
    bytes_before: int
    bytes_after: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return asdict(self)


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: Format | str = Format.QUADS,
    contract: Contract | None = None,
    progress: Progress | None = None,
    compensation: CompensationState | None = None,
    input_scales: Mapping[str, float] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    device: torch.device | str = "cpu",
) -> QuantizeReport:
    """Quantize the checkpoint directory `src` into a new one at `dst`.

    Source tensors are read in the order of the shards, one at a time; the siblings of a scale group (gate and up,
    q, k and v) are read together wherever they lie. Besides one such group, memory holds at most one shard of the
    result. The result is verified before it appears at `dst` (see `CheckpointWriter`). After an interruption call it
    again: it starts anew and clears what was left.

    Args:
        format: `quads`, `modelopt` or `compressed-tensors`.
        contract: what is quantized and how; Contract() if None.
        compensation: state (channel sets, centring) to store with the checkpoint.
        input_scales: static activation scales amax/2688 by canonical name; required by a `static` contract.
        device: where to quantize; the bytes are the same on all.

    Raises:
        CheckpointError: the source is damaged, incomplete or already quantized, or `dst` is in the way.
        ContractError: the contract does not fit the model or the format.
        FormatError: a weight holds NaN or Inf, naming it.
    """
    start = time.perf_counter()
    contract = contract or Contract()
    _require_apart(Path(src), Path(dst))
    with CheckpointReader(src) as reader:
        info = _bf16_source(reader)
        chosen = contract.resolve(info.weights, info.num_layers)
        scales = _input_scales(contract, chosen, input_scales or {})
        sources = _Sources(reader, info, torch.device(device))
        with CheckpointWriter(
            dst,
            format=format,
            contract=contract,
            config=info.config,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
        ) as writer:
            _write_all(reader, sources, chosen, scales, writer, progress)
            writer.finish(copy_files_from=src, compensation=compensation)
            fingerprint = writer.fingerprint
        before = reader.total_bytes
    if progress is not None:
        progress(before, before, "")
    with CheckpointReader(dst) as result:
        after = result.total_bytes
    return QuantizeReport(
        path=str(dst),
        format=Format(format).value,
        fingerprint=fingerprint,
        quantized=len(chosen),
        kept=len(info.weights) - len(chosen),
        bytes_before=before,
        bytes_after=after,
        seconds=time.perf_counter() - start,
    )


def check_quantizable(
    src: str | Path, dst: str | Path, format: Format | str, contract: Contract, *, overwrite: bool = False
) -> None:
    """Raise what `quantize_checkpoint` would, as far as headers and options tell: before a calibration, not after."""
    _require_apart(Path(src), Path(dst))
    check_storable(contract, Format(format))
    with CheckpointReader(src) as reader:
        info = _bf16_source(reader)
        contract.resolve(info.weights, info.num_layers)
    require_free(Path(dst), overwrite=overwrite)


def _require_apart(src: Path, dst: Path) -> None:
    if src.resolve().is_relative_to(dst.resolve()):
        what = "is the source itself" if dst.resolve() == src.resolve() else f"holds the source {src}"
        raise CheckpointError(f"{dst}: {what}; choose another directory")


def _bf16_source(reader: CheckpointReader) -> CheckpointInfo:
    """What a complete BF16 checkpoint holds. Raises CheckpointError for any other."""
    info = describe_reader(reader)
    if info.format is not Format.BF16:
        raise CheckpointError(
            f"{reader.path}: is already quantized ({info.format.value}); quantize the BF16 checkpoint"
        )
    for problem in header_problems(reader, info):
        raise problem
    return info


def _write_all(
    reader: CheckpointReader,
    sources: _Sources,
    chosen: QuantizedSet,
    scales: Mapping[str, float | None],
    writer: CheckpointWriter,
    progress: Progress | None,
) -> None:
    """Every tensor in the order of the shards, quantized or as it is."""
    done: set[str] = set()
    read = 0
    for name in reader.names:
        if progress is not None:
            progress(read, reader.total_bytes, name)
        if any(member in chosen for member in sources.members(name)):
            _convert(sources, name, writer, scales, done)
        else:
            _check_finite(name, reader.get(name))
            writer.add(name, reader.get(name))
        read += reader.headers[name].nbytes


class _Sources:
    """Where each matrix of the model lies: a tensor of its own, or a part of a fused stack."""

    def __init__(self, reader: CheckpointReader, info: CheckpointInfo, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._tensor: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        for name, header in reader.headers.items():
            if is_stack(name, len(header.shape)):
                check_stack(name, header.shape, info.config)
                self._members[name] = expand(name, header.shape[0])
            elif len(header.shape) == 2 and name.endswith(".weight"):
                self._members[name] = [canonical_name(name)]
            self._tensor |= dict.fromkeys(self._members.get(name, ()), name)
        self._stack: tuple[str, dict[str, Tensor]] = ("", {})

    def members(self, name: str) -> list[str]:
        """Canonical names of the matrices that a source tensor holds."""
        return self._members.get(name, [])

    def disk_name(self, canonical: str) -> str:
        """Module name of a matrix as the source spells it; canonical for a part of a stack."""
        name = self._tensor[canonical]
        return canonical if is_stack(name, len(self._reader.headers[name].shape)) else name.removesuffix(".weight")

    def matrix(self, canonical: str) -> Tensor:
        """One matrix [N, K]; the stack that it comes from stays mapped until the next one."""
        name = self._tensor[canonical]
        if self._members[name] == [canonical] and not is_stack(name, len(self._reader.headers[name].shape)):
            return self._reader.get(name).to(self._device)
        if self._stack[0] != name:
            self._stack = (name, dict(unstack(name, self._reader.get(name))))
        return self._stack[1][canonical].to(self._device)

    def __contains__(self, canonical: str) -> bool:
        return canonical in self._tensor


def _convert(
    sources: _Sources, name: str, writer: CheckpointWriter, scales: Mapping[str, float | None], done: set[str]
) -> None:
    """Write the scale groups that have a matrix in source tensor `name`, unless an earlier sibling brought them.

    `scales` has a key for every matrix that is quantized; a stack may hold others, which stay as they are.
    """
    for group in dict.fromkeys(map(scale_group, sources.members(name))):
        if group in done:
            continue
        done.add(group)
        members = {m: sources.matrix(m) for m in group_members(group) if m in sources}
        if next(iter(members)) not in scales:
            for member, weight in members.items():
                _check_finite(member, weight)
                writer.add(f"{sources.disk_name(member)}.weight", weight)
            continue
        amax = torch.stack([weight_amax(w, m) for m, w in members.items()]).amax()
        for member, weight in members.items():
            packed = PackedTensor.quantize(weight, amax=amax, name=member)
            writer.add_packed(sources.disk_name(member), packed, input_scale=scales[member])


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name}: holds NaN or Inf; the model has diverged or the file is damaged")


def _input_scales(contract: Contract, chosen: QuantizedSet, given: Mapping[str, float]) -> dict[str, float | None]:
    static = contract.scheme is Scheme.W4A4 and contract.activation.global_scale is ActivationGlobalScale.STATIC
    scales = {name: given.get(name) for name in chosen.shapes}
    missing = next((n for n, s in scales.items() if s is None), None)
    if static and missing is not None:
        raise ContractError(
            f"activation.global_scale: is static, but there is no input scale for {missing}; calibrate "
            f"(`quads quantize --calibrate PROMPTS.txt`) or use `token`"
        )
    return scales
