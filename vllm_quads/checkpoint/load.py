# SPDX-License-Identifier: Apache-2.0
"""Packed weights out of a checkpoint of any of the three formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from vllm_quads.checkpoint.info import CheckpointInfo, describe_reader
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.nvfp4.errors import CheckpointError
from vllm_quads.nvfp4.fingerprint import fingerprint, packed_digest
from vllm_quads.nvfp4.names import canonical_name
from vllm_quads.nvfp4.packed import PackedTensor


def load_packed(path: str | Path, name: str) -> PackedTensor:
    """One packed weight [N, K] by any spelling of its name, values checked.

    Raises CheckpointError if the checkpoint does not hold it packed, FormatError if its tensors do not fit together
    or its scales are NaN, negative or not finite.
    """
    with CheckpointReader(path) as reader:
        return read_packed(reader, describe_reader(reader), name)


def iter_packed(path: str | Path) -> Iterator[tuple[str, PackedTensor]]:
    """(canonical name, packed weight [N, K]) of every packed weight, shard by shard, values checked."""
    with CheckpointReader(path) as reader:
        info = describe_reader(reader)
        for name in info.modules:
            yield name, read_packed(reader, info, name)


def fingerprint_checkpoint(path: str | Path) -> str:
    """Fingerprint of the packed weights, comparable with a trainer's and an engine's."""
    return fingerprint({name: int(packed_digest(packed)) for name, packed in iter_packed(path)})


def read_packed(reader: CheckpointReader, info: CheckpointInfo, name: str, *, check: bool = True) -> PackedTensor:
    """`load_packed` from an open reader."""
    canonical = canonical_name(name)
    module = info.modules.get(canonical)
    if module is None:
        state = "is in the checkpoint but not packed" if canonical in info.weights else "is not in the checkpoint"
        raise CheckpointError(f"{info.path}: {canonical} {state}")
    info.layout.check(module, reader.headers)
    packed = info.layout.read(module, reader.get, canonical)
    if check:
        packed.check_values()
    return packed


def read_input_scale(reader: CheckpointReader, info: CheckpointInfo, name: str) -> Tensor | None:
    """The stored activation scale of a packed weight in decode direction (amax/2688), float32 scalar, or None."""
    tensor = f"{info.modules[canonical_name(name)]}.{info.layout.input_scale}"
    if tensor not in reader.headers:
        return None
    value = reader.get(tensor).reshape(())
    return 1.0 / value if info.layout.encode else value
