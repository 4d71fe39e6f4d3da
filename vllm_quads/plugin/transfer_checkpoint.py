# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory as the payload of a refit, read by every worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_quads.checkpoint import Format, detect, fingerprint_checkpoint, verify_headers
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.transfer_receive import TORCH_DTYPES
from vllm_quads.refit import Manifest, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_quads.plugin.config import QuadsConfig

_BATCH = 256 * 2**20


def checkpoint_manifest(
    path: str | Path, config: QuadsConfig, policy_version: int, fingerprint: str | None
) -> Manifest:
    """What a refit from this directory will send.

    A BF16 checkpoint is quantized with the engine's contract. Without a fingerprint that of the files is computed,
    which reads their packed weights once more. Raises CheckpointError for a directory that is damaged or incomplete.
    """
    info = verify_headers(path)
    with CheckpointReader(path) as reader:
        tensors = {n: TensorSpec(tuple(h.shape), _dtype(n, h.dtype)) for n, h in reader.headers.items()}
    if info.format is Format.BF16:
        contract, quantized = config.contract, config.contract.resolve(info.weights)
    else:
        if info.contract is None:
            raise RefitError(f"{path}: holds no quantized weight; the engine serves {len(config.quantized or ())}")
        contract, quantized = info.contract, info.quantized
        fingerprint = fingerprint or fingerprint_checkpoint(path)
    return Manifest(contract, quantized, tensors, policy_version, fingerprint)


def checkpoint_tensors(path: str | Path) -> Iterator[list[tuple[str, Tensor]]]:
    """Its tensors, shard by shard, in batches of some 256 MiB."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    with CheckpointReader(path) as reader:
        for name, tensor in reader.items():
            batch.append((name, tensor))
            size += tensor.nbytes
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def checkpoint_state(path: str | Path, config: QuadsConfig) -> CompensationState | None:
    """Channel sets and centring vectors that it carries. Raises CheckpointError if they are not of this model."""
    state = CompensationState.load(detect(path).path)
    if state is not None:
        config.check_compensation(state)
    return state


def _dtype(name: str, text: str) -> torch.dtype:
    dtype = TORCH_DTYPES.get(text)
    if dtype is None:
        raise RefitError(f"{name}: is stored as {text}, which an engine cannot take")
    return dtype


__all__ = ["checkpoint_manifest", "checkpoint_state", "checkpoint_tensors"]
