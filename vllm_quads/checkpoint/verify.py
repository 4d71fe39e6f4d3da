# SPDX-License-Identifier: Apache-2.0
"""`verify_headers`: whether a checkpoint is complete and consistent with its contract, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_quads.checkpoint.disk_names import disk_name
from vllm_quads.checkpoint.info import CheckpointInfo, describe_reader
from vllm_quads.checkpoint.layouts import SCALE_SUFFIXES, Format
from vllm_quads.checkpoint.patterns import excludes
from vllm_quads.checkpoint.quant_configs import LINEAR
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.checkpoint.structure import structure_problems
from vllm_quads.nvfp4.errors import CheckpointError, MismatchError, QuadsError
from vllm_quads.nvfp4.names import Kind, kind_of


def verify_headers(path: str | Path) -> CheckpointInfo:
    """Check a checkpoint by its headers and return what it holds.

    Raises CheckpointError (or ContractError) for the first problem: a missing or truncated shard, a missing or extra
    scale tensor, a wrong dtype or shape, a K that is not a multiple of 16, a missing layer or expert, or packed
    tensors that are not those of the contract or ignore list.
    """
    with CheckpointReader(path) as reader:
        info = describe_reader(reader)
        for problem in header_problems(reader, info):
            raise problem
    return info


def header_problems(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[QuadsError]:
    """Every problem that headers show, most basic first."""
    if info.format is Format.BF16:
        yield from structure_problems(reader, info)
        yield from (_extra(name) for name in reader.headers if name.endswith(_dotted(SCALE_SUFFIXES)))
        return
    layout = info.layout
    yield from _tensor_problems(reader, info)
    yield from structure_problems(reader, info)
    owned = {f"{m}.{s}" for m in info.modules.values() for s in layout.scales}
    yield from (_extra(n) for n in reader.headers if n.endswith(_dotted(SCALE_SUFFIXES)) and n not in owned)
    yield from _set_problems(info)


def _dotted(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("." + s for s in suffixes)


def _extra(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: is a scale tensor without a packed weight of this format beside it; the checkpoint mixes formats "
        f"or lost the weight"
    )


def _tensor_problems(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[QuadsError]:
    for module in info.modules.values():
        try:
            info.layout.check(module, reader.headers)
        except CheckpointError as e:
            yield e
    for name, header in reader.headers.items():
        if name.endswith("." + info.layout.codes) and header.dtype == "U8" and len(header.shape) != 2:
            yield CheckpointError(f"{name}: packed codes have shape {list(header.shape)}, expected [N, K/2]")


def _set_problems(info: CheckpointInfo) -> Iterator[QuadsError]:
    """Packed tensors against the contract (quads) or the ignore list (foreign formats)."""
    if not info.quantized.shapes:
        yield CheckpointError(f"{info.path}: its configuration says {info.format.value}, but no weight is packed")
        return
    if info.format is Format.QUADS:
        assert info.contract is not None
        try:
            chosen = info.contract.resolve(info.weights, info.num_layers)
            chosen.require_equal(info.quantized, "contract", "checkpoint")
        except MismatchError as e:
            yield CheckpointError(f"{info.path}: {e}")
        except QuadsError as e:
            yield e
        return
    for name in info.weights:
        module = info.modules.get(name)
        on_disk = module or disk_name(name, info.config)
        covered = next((p for p in info.ignore if excludes(p, on_disk)), None)
        targeted = LINEAR in info.targets or any(excludes(p, on_disk) for p in info.targets)
        if module is not None and covered is not None:
            yield CheckpointError(f"{module}: is packed, but the ignore list excludes it ({covered!r})")
        elif module is None and targeted and covered is None and kind_of(name) in (Kind.EXPERT, Kind.LINEAR):
            yield CheckpointError(
                f"{name}: is not packed, but the ignore list does not name it, so an engine would expect packed tensors"
            )
