# SPDX-License-Identifier: Apache-2.0
"""The 128x4 block-scale layout of Blackwell's block-scaled MMA (cuBLAS "1D block scaling factors layout").

Scales [M, C] with C = K/16 are padded to multiples of 128 rows and 4 columns; the byte of (r, c) lies at
((r/128) * ceil(C/4) + c/4) * 512 + (r%32) * 16 + ((r/32)%4) * 4 + c%4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError

ROWS = 128
COLUMNS = 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the swizzled buffer for linear scales [rows, columns]."""
    return (-(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS)


def swizzle(scales: Tensor) -> Tensor:
    """Linear scales [..., M, C] to the swizzled layout [..., Mp, Cp]; padding is zero. Any 1-byte dtype."""
    raw = _as_bytes(scales)
    *lead, rows, columns = raw.shape
    m, c = padded_shape(rows, columns)
    padded = raw.new_zeros((*lead, m, c))
    padded[..., :rows, :columns] = raw
    tiles = padded.reshape(*lead, m // ROWS, 4, 32, c // COLUMNS, COLUMNS)
    # [row tile, column tile, row % 32, (row / 32) % 4, column % 4]
    ordered = tiles.movedim((-2, -3, -4), (-4, -3, -2))
    return ordered.reshape(*lead, m, c).contiguous().view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle`: the linear scales [..., rows, columns]."""
    raw = _as_bytes(swizzled)
    *lead, m, c = raw.shape
    if (m, c) != padded_shape(rows, columns):
        raise FormatError(f"swizzled scales have shape {(m, c)}, expected {padded_shape(rows, columns)}")
    tiles = raw.reshape(*lead, m // ROWS, c // COLUMNS, 32, 4, COLUMNS)
    linear = tiles.movedim((-4, -3, -2), (-2, -3, -4)).reshape(*lead, m, c)
    return linear[..., :rows, :columns].contiguous().view(swizzled.dtype)


def _as_bytes(scales: Tensor) -> Tensor:
    if scales.element_size() != 1:
        raise FormatError(f"block scales are {scales.dtype}, expected a 1-byte dtype")
    return scales.contiguous().view(torch.uint8)
