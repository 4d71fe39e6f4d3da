# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the digests of `vllm_quads.nvfp4.fingerprint`: of packed matrices, and of tensors of any form."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _position_weights(position):
    """Odd 64-bit weights of positions."""
    i = (position.to(tl.int64) + 1) * -7046029254386353131
    return ((i ^ (i >> 27)) * -4658895280553007687) | 1


@triton.jit
def _digest_part(pointer, rows, columns, row_stride, row_offset, column_offset, R: tl.constexpr, C: tl.constexpr):
    """This program's part of the digest of a matrix of integer words: one tile of columns, every so many rows."""
    across = tl.cdiv(columns, C)
    groups = tl.num_programs(0) // across
    group = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * C + tl.arange(0, C)
    lane = tl.arange(0, R)
    tiles = tl.cdiv(rows, R)
    start = tl.where(group < groups, group, tiles)  # programs that are left over have nothing to do
    total = tl.zeros((R, C), tl.int64)
    for tile in range(start, tiles, groups):
        row = tile * R + lane
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        word = tl.load(pointer + row[:, None] * row_stride + column[None, :], mask=inside, other=0)
        x = (word.to(tl.int64) + 0x5BD1E995) * -7046029254386353131
        weight = tl.where(row < rows, _position_weights(row + row_offset), 0)
        total += (x ^ (x >> 31)) * weight[:, None]
    weight = tl.where(column < columns, _position_weights(column + column_offset), 0)
    return tl.sum(tl.sum(total, axis=0) * weight, axis=0)


@triton.jit
def digest_kernel(
    codes,
    scales,
    decode_scale,
    out,
    rows,
    columns,
    c_matrix,
    c_row,
    s_matrix,
    s_row,
    row_offset,
    column_offset,
    GLOBAL: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Adds the digest of each packed matrix to out [matrices] int64: (3 * codes + scales) * 5 + decode scale.

    codes: int32 words of eight, `columns` a row; scales: uint8, half as many a row.
    """
    matrix = tl.program_id(1)
    wide = matrix.to(tl.int64)
    codes += wide * c_matrix
    scales += wide * s_matrix
    total = 15 * _digest_part(codes, rows, columns, c_row, row_offset, column_offset, R, C)
    total += 5 * _digest_part(scales, rows, columns // 2, s_row, row_offset, column_offset // 2, R, C)
    if GLOBAL:
        word = tl.load(decode_scale + matrix).to(tl.int32, bitcast=True).to(tl.int64)
        x = (word + 0x5BD1E995) * -7046029254386353131
        weight = _position_weights(tl.zeros((), tl.int32))
        total += tl.where(tl.program_id(0) == 0, (x ^ (x >> 31)) * weight * weight, 0)
    tl.atomic_add(out + matrix, total)


@triton.jit
def digest_tensors_kernel(table, out, COLUMNS: tl.constexpr):
    """Adds the digests of tensors to out int64: words as rows of COLUMNS, every so many of them for each program.

    table: int64 [tensors, 3], address, 32-bit words, and index in out.
    """
    entry = table + 3 * tl.program_id(1)
    pointer = tl.load(entry).to(tl.pointer_type(tl.int32))
    words = tl.load(entry + 1)
    lane = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int64)
    for row in range(tl.program_id(0), tl.cdiv(words, COLUMNS).to(tl.int32), tl.num_programs(0)):
        here = row + tl.zeros((1,), tl.int64)
        at = here * COLUMNS + lane
        x = (tl.load(pointer + at, mask=at < words, other=0).to(tl.int64) + 0x5BD1E995) * -7046029254386353131
        total += tl.where(at < words, (x ^ (x >> 31)) * _position_weights(here), 0)
    tl.atomic_add(out + tl.load(entry + 2), tl.sum(total * _position_weights(lane), axis=0))
