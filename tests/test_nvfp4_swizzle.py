# SPDX-License-Identifier: Apache-2.0
"""The 128x4 scale layout of Blackwell's block-scaled MMA."""

from __future__ import annotations

import pytest
import torch

from vllm_quads.nvfp4 import FormatError, swizzle, unswizzle

SHAPES = [(128, 4), (1, 1), (130, 5), (256, 8), (31, 48)]


def _scales(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bytes_lie_where_the_formula_says(rows: int, columns: int) -> None:
    """offset(r, c) = ((r/128)*ceil(C/4) + c/4)*512 + (r%32)*16 + ((r/32)%4)*4 + c%4, and padding is zero."""
    scales = _scales(rows, columns)
    flat = swizzle(scales).flatten().tolist()
    tiles = -(-columns // 4)
    seen = set()
    for r in range(rows):
        for c in range(columns):
            offset = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + c % 4
            assert flat[offset] == scales[r, c]
            seen.add(offset)
    assert all(v == 0 for i, v in enumerate(flat) if i not in seen)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_round_trip(rows: int, columns: int) -> None:
    """unswizzle is the inverse, for E4M3 and with leading expert dimensions."""
    scales = _scales(2, 3, rows, columns).view(torch.float8_e4m3fn)
    back = unswizzle(swizzle(scales), rows, columns)
    assert back.dtype == scales.dtype
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_an_expert_dimension_is_a_stride() -> None:
    """Each expert's scales are swizzled on their own."""
    scales = _scales(3, 130, 5)
    assert torch.equal(swizzle(scales)[1], swizzle(scales[1]))


def test_wrong_shape_or_dtype_is_refused() -> None:
    """A buffer that cannot be a swizzled one is an error, as is a scale dtype of another width."""
    with pytest.raises(FormatError, match=r"expected \(256, 8\)"):
        unswizzle(torch.zeros(128, 8, dtype=torch.uint8), 130, 5)
    with pytest.raises(FormatError, match="1-byte"):
        swizzle(torch.zeros(128, 4))
