# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: short digests of packed codes and scales, the same on every device.

A tensor's bytes are read as 32-bit words, mixed, and summed with position-dependent odd weights modulo 2^64. Integer
sums do not depend on their order, so CPU and GPU agree, a shard contributes its own terms, and a reduction over a rank
group gives the digest of the full tensor. It guards against mistakes (a stale, swapped, missing or moved value), not
against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_quads.nvfp4.packed import PackedTensor

_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64 (golden-ratio multiplier of splitmix64)
_FINAL = -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64


def _weights(count: int, offset: int, device: torch.device) -> Tensor:
    """Odd 64-bit weights of positions offset .. offset+count."""
    i = torch.arange(offset + 1, offset + count + 1, dtype=torch.int64, device=device) * _MIX
    return ((i ^ (i >> 27)) * _FINAL) | 1


def matrix_digest(data: Tensor, *, row_offset: int = 0, column_offset: int = 0) -> Tensor:
    """Digests int64 [...] of matrices [..., N, C] of any dtype (C * itemsize is zero-padded to 4 bytes).

    Offsets place a shard in the full matrix, in rows and in 32-bit words; the digests of disjoint shards add up
    (modulo 2^64) to that of the full matrix.
    """
    raw = data.contiguous().view(torch.uint8)
    pad = -raw.shape[-1] % 4
    if pad:
        raw = torch.nn.functional.pad(raw, (0, pad))
    words = raw.view(torch.int32)
    *lead, rows, columns = words.shape
    row_weights = _weights(rows, row_offset, raw.device)
    column_weights = _weights(columns, column_offset, raw.device)
    out = []
    for matrix in words.reshape(-1, rows, columns):  # one matrix at a time bounds the int64 temporary
        x = (matrix.to(torch.int64) + 0x5BD1E995) * _MIX
        x = (x ^ (x >> 31)) * column_weights
        out.append((x.sum(dim=-1) * row_weights).sum())
    return torch.stack(out).reshape(lead) if out else torch.zeros(lead, dtype=torch.int64, device=raw.device)


def packed_digest(packed: PackedTensor) -> Tensor:
    """Digests int64 [...] of packed weights [..., N, K]: codes, block scales and global scale."""
    codes = matrix_digest(packed.codes)
    scales = matrix_digest(packed.block_scales)
    decode = matrix_digest(packed.decode_scale[..., None, None])
    return (codes * 3 + scales) * 5 + decode


def fingerprint(digests: Mapping[str, int]) -> str:
    """16 hex digits over named digests; the order of the mapping does not matter."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(digests):
        h.update(f"{name}={digests[name] & 0xFFFFFFFFFFFFFFFF:016x};".encode())
    return h.hexdigest()


def fingerprint_of(tensors: Mapping[str, PackedTensor]) -> str:
    """Fingerprint of named packed 2-D weights (canonical name -> PackedTensor [N, K])."""
    return fingerprint({name: int(packed_digest(t)) for name, t in tensors.items()})
