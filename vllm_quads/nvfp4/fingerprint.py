# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: short digests of packed codes and scales, the same on every device.

A tensor is read as words (32 bits of codes, one block scale, the global scale), mixed, and summed with odd weights that
depend on the position, modulo 2^64. Integer sums do not depend on their order, so CPU and GPU agree, a shard adds its
own terms, and a sum over ranks gives the digest of the full tensor: K may be cut at any multiple of 16. A digest guards
against mistakes (a stale, swapped, missing or moved value), not against an adversary.

Digests of matrices add up to those of *units*, the tensors that a rollout stores as one (gate and up of all experts of
a layer; q, k, v), and the fingerprint is a hash over the units: a refit compares units and names the first that
differs. Tensors that are not quantized are digested as they are sent (`tensor_digest`), and belong to no fingerprint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import scale_group
from vllm_quads.nvfp4.packed import PackedTensor

_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64 (golden-ratio multiplier of splitmix64)
_FINAL = -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64
_BIAS = (0x5BD1E995 * _MIX + 2**63) % 2**64 - 2**63  # so that words of zeros count
_EXPERT_INDEX = re.compile(r"\.experts\.\d+\.")
CODES_PER_WORD = 8
TENSOR_COLUMNS = 1024
"""Words in a row of the matrix that `tensor_digest` reads a tensor as."""
_CPU_CHUNK = 1 << 15
"""Words that are digested at a time on a CPU, whose cache holds the two int64 temporaries then."""
_DEVICE_CHUNK = 1 << 24
"""The same on a device, where each step is a launch."""


def _weights(count: int, offset: int, device: torch.device) -> Tensor:
    """Odd 64-bit weights of positions offset .. offset+count."""
    i = torch.arange(offset + 1, offset + count + 1, dtype=torch.int64, device=device) * _MIX
    return ((i ^ (i >> 27)) * _FINAL) | 1


def _words_digest(words: Tensor, row_offset: int, column_offset: int) -> Tensor:
    """Digests int64 [...] of integer words [..., N, C]."""
    *lead, rows, columns = words.shape
    row_weights = _weights(rows, row_offset, words.device)
    column_weights = _weights(columns, column_offset, words.device)
    on_cpu = words.device.type == "cpu"
    step = max(1, min(rows, (_CPU_CHUNK if on_cpu else _DEVICE_CHUNK) // max(1, columns)))
    bias = torch.full((1,), _BIAS, dtype=torch.int64, device=words.device)
    x = torch.empty(step, columns, dtype=torch.int64, device=words.device)
    shifted = torch.empty_like(x)
    out = []
    for matrix in words.reshape(-1, rows, columns):
        sums = torch.empty(rows, dtype=torch.int64, device=words.device)
        for start in range(0, rows, step):
            part = matrix[start : start + step]
            mixed, high = x[: part.shape[0]], shifted[: part.shape[0]]
            torch.add(bias, part, alpha=_MIX, out=mixed)  # (word + 0x5BD1E995) * _MIX
            torch.bitwise_right_shift(mixed, 31, out=high)
            mixed.bitwise_xor_(high)
            if on_cpu:
                torch.mv(mixed, column_weights, out=sums[start : start + step])
            else:  # which has no such product of integers
                torch.sum(mixed.mul_(column_weights), dim=-1, out=sums[start : start + step])
        out.append((sums * row_weights).sum())
    return torch.stack(out).reshape(lead) if out else torch.zeros(lead, dtype=torch.int64, device=words.device)


def as_words(data: Tensor) -> Tensor:
    """Bytes of a tensor [..., C] as int32 [..., ceil(C * itemsize / 4)], zero-padded; a view where that can be."""
    raw = data.contiguous()
    if raw.stride(-1) != 1:  # of a single element
        raw = raw.clone(memory_format=torch.contiguous_format)
    raw = raw.view(torch.uint8)
    pad = -raw.shape[-1] % 4
    if pad:
        raw = torch.nn.functional.pad(raw, (0, pad))
    elif raw.storage_offset() % 4 or raw.data_ptr() % 4:
        raw = raw.clone()
    return raw.view(torch.int32)


def matrix_digest(data: Tensor, *, row_offset: int = 0, column_offset: int = 0) -> Tensor:
    """Digests int64 [...] of matrices [..., N, C] of any dtype (C * itemsize is zero-padded to 4 bytes).

    Offsets place a shard in the full matrix, in rows and in 32-bit words; the digests of disjoint shards add up
    (modulo 2^64) to that of the full matrix.
    """
    return _words_digest(as_words(data), row_offset, column_offset)


def tensor_digest(tensor: Tensor) -> Tensor:
    """Digest int64 of the bytes of a tensor of any shape and dtype.

    Their 32-bit words (the last one zero-padded) are a matrix of `TENSOR_COLUMNS` columns; the last row may be shorter.
    """
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return digest
    words = as_words(tensor.reshape(-1))
    rows = words.numel() // TENSOR_COLUMNS
    whole, rest = words[: rows * TENSOR_COLUMNS], words[rows * TENSOR_COLUMNS :]
    if rows:
        digest = digest + _words_digest(whole.view(rows, TENSOR_COLUMNS), 0, 0)
    return digest + _words_digest(rest[None], rows, 0) if rest.numel() else digest


def packed_digest(packed: PackedTensor, *, row_offset: int = 0, k_offset: int = 0, count_global: bool = True) -> Tensor:
    """Digests int64 [...] of packed weights [..., N, K]: codes, block scales and global scale.

    Offsets place a shard in the full matrix, in rows and channels (a multiple of 16); exactly one shard of a matrix may
    count the global scale, which all of them have. Digests of disjoint shards then add up to that of the full matrix.
    """
    codes = matrix_digest(packed.codes, row_offset=row_offset, column_offset=k_offset // CODES_PER_WORD)
    scales = _words_digest(packed.block_scales.view(torch.uint8), row_offset, k_offset // BLOCK_SIZE)
    digest = (codes * 3 + scales) * 5
    return digest + matrix_digest(packed.decode_scale[..., None, None]) if count_global else digest


@lru_cache(maxsize=1 << 17)
def name_weight(name: str) -> int:
    """Odd weight of a matrix within its unit, as a signed 64-bit integer."""
    raw = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True) | 1


def name_weights(names: Iterable[str], device: torch.device | None = None) -> Tensor:
    """`name_weight` of several matrices, int64 [n]; `(digests * name_weights).sum()` is their unit's digest."""
    return torch.tensor([name_weight(n) for n in names], dtype=torch.int64, device=device)


def unit_of(name: str) -> str:
    """The unit that a matrix belongs to: `...experts.17.gate_proj` -> `...experts.gate_up_proj`, q_proj -> qkv_proj."""
    return _EXPERT_INDEX.sub(".experts.", scale_group(name)).removeprefix(".")


def unit_digests(digests: Mapping[str, int]) -> dict[str, int]:
    """Digests of units (0 .. 2^64) from those of their matrices (canonical names)."""
    units: dict[str, int] = {}
    for name, digest in digests.items():
        unit = unit_of(name)
        units[unit] = (units.get(unit, 0) + name_weight(name) * digest) & 0xFFFFFFFFFFFFFFFF
    return units


def unit_fingerprint(units: Mapping[str, int]) -> str:
    """16 hex digits over digests of units; the order of the mapping does not matter."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(units):
        h.update(f"{name}={units[name] & 0xFFFFFFFFFFFFFFFF:016x};".encode())
    return h.hexdigest()


def fingerprint(digests: Mapping[str, int]) -> str:
    """16 hex digits over named digests of matrices; the order of the mapping does not matter."""
    return unit_fingerprint(unit_digests(digests))


def fingerprint_of(tensors: Mapping[str, PackedTensor]) -> str:
    """Fingerprint of named packed 2-D weights (canonical name -> PackedTensor [N, K])."""
    return fingerprint({name: int(packed_digest(t)) for name, t in tensors.items()})
