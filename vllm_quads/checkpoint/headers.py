# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers: names, dtypes and shapes of a shard without reading its data, and whether it is complete.

A shard is 8 bytes of header length (little endian), a JSON header with `data_offsets` per tensor, and the data. The
safetensors library refuses a damaged file too, but says neither which file nor how much is missing.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from vllm_quads.nvfp4.errors import CheckpointError

_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4}
FLOATING = ("F64", "F32", "F16", "BF16")
"""Safetensors dtype names of weights that are not quantized."""


@dataclass(frozen=True)
class TensorHeader:
    """What a shard says about one tensor."""

    file: str
    dtype: str
    """Safetensors dtype name, for example `BF16`, `U8`, `F8_E4M3`."""
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Tensors of one shard. Raises CheckpointError naming the file if it is missing, truncated or no safetensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            prefix = f.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: is truncated ({size} bytes, no header); copy or download it again")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER:
                raise CheckpointError(f"{path}: is not a safetensors file (header of {length} bytes)")
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror}); copy or download it again") from e
    if len(raw) < length:
        raise CheckpointError(f"{path}: is truncated inside its header; copy or download it again")
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = {n: _tensor(path.name, e) for n, e in entries.items()}
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise CheckpointError(f"{path}: is not a safetensors file (header: {e})") from e
    for name, entry in entries.items():
        begin, stop = entry["data_offsets"]
        if stop - begin != tensors[name].nbytes:
            raise CheckpointError(
                f"{path}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, which takes "
                f"{tensors[name].nbytes} bytes, but the header gives it {stop - begin}; the file is damaged"
            )
    expected = 8 + length + end
    if size != expected:
        what = "is truncated" if size < expected else "has bytes after its last tensor"
        raise CheckpointError(f"{path}: {what} ({size} bytes, expected {expected}); copy or download it again")
    return tensors


def _tensor(file: str, entry: dict[str, object]) -> TensorHeader:
    dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])  # type: ignore[attr-defined]
    return TensorHeader(file, dtype, shape, math.prod(shape) * _BITS[dtype] // 8)
