# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: equal exactly when names, codes and scales are equal, and additive over shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_quads.nvfp4 import PackedTensor, fingerprint, fingerprint_of, matrix_digest, packed_digest


def _bytes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, columns), generator=g, dtype=torch.int32).to(torch.uint8)


def _packed(seed: int = 0, lead: tuple[int, ...] = ()) -> PackedTensor:
    return PackedTensor.quantize(torch.randn(*lead, 8, 64, generator=torch.Generator().manual_seed(seed)))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.data())
def test_one_flipped_bit_changes_the_digest(rows: int, columns: int, data: st.DataObject) -> None:
    """Any single bit, anywhere, in any shape (columns that do not fill a word included)."""
    a = _bytes(rows, columns)
    b = a.clone()
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    b[r, c] ^= 1 << data.draw(st.integers(0, 7))
    assert matrix_digest(a) != matrix_digest(b)


def test_position_matters() -> None:
    """Swapped rows, swapped words, moved bytes and a reshape all change the digest."""
    a = _bytes(8, 32)
    others = [
        a[torch.tensor([1, 0, *range(2, 8)])],
        a.roll(4, dims=1),
        a.roll(1, dims=1),
        a.reshape(16, 16),
        a.T.contiguous(),
    ]
    assert len({int(matrix_digest(x)) for x in (a, *others)}) == 6


def test_shards_add_up_in_rows_and_columns() -> None:
    """TP shards by rows (w13) and by columns (w2) sum, modulo 2^64, to the digest of the full matrix."""
    a = _bytes(12, 48)
    full = matrix_digest(a)
    assert matrix_digest(a[:5]) + matrix_digest(a[5:], row_offset=5) == full
    assert matrix_digest(a[:, :16]) + matrix_digest(a[:, 16:], column_offset=4) == full
    parts = sum(
        matrix_digest(a[r : r + 6, c : c + 24], row_offset=r, column_offset=c // 4) for r in (0, 6) for c in (0, 24)
    )
    assert parts == full


def test_digest_reads_bytes_whatever_the_dtype_or_stride() -> None:
    """float8, float32 and strided views digest as their bytes; leading dimensions give one digest each."""
    a = _bytes(8, 32)
    assert matrix_digest(a.view(torch.float8_e4m3fn)) == matrix_digest(a) == matrix_digest(a.view(torch.float32))
    wide = torch.cat((a, a), dim=1)
    assert matrix_digest(wide[:, :32]) == matrix_digest(a)
    assert matrix_digest(torch.stack((a, a.flip(0))))[1] == matrix_digest(a.flip(0))


@pytest.mark.parametrize("field", ["codes", "block_scales", "decode_scale"])
def test_packed_digest_covers_every_part(field: str) -> None:
    """One changed byte of the codes, the block scales or the global scale changes the packed digest."""
    packed = _packed()
    part = getattr(packed, field).clone()
    part.reshape(-1).view(torch.uint8)[0] ^= 1
    assert packed_digest(packed) != packed_digest(dataclasses.replace(packed, **{field: part}))


def test_stack_digests_are_those_of_the_experts() -> None:
    """A stacked [E, N, K] tensor has the digests of its matrices, so both layouts give one fingerprint."""
    stack = _packed(lead=(3,))
    for e in range(3):
        one = PackedTensor(stack.codes[e], stack.block_scales[e], stack.decode_scale[e])
        assert packed_digest(stack)[e] == packed_digest(one)


def test_fingerprint_names_and_order() -> None:
    """The order of the mapping does not matter; names, swapped tensors and missing tensors do."""
    a, b = _packed(0), _packed(1)
    base = fingerprint_of({"x": a, "y": b})
    assert base == fingerprint_of({"y": b, "x": a})
    others = [fingerprint_of(m) for m in ({"x": b, "y": a}, {"x": a}, {"x": a, "z": b}, {})]
    assert len({base, *others}) == 5
    assert len(base) == 16


def test_fingerprint_of_negative_digests() -> None:
    """Digests are int64 and may be negative; both readings of the 64 bits are the same."""
    assert fingerprint({"x": -1}) == fingerprint({"x": 2**64 - 1})


def test_known_value() -> None:
    """The digest is part of the protocol between releases: a fixed input has a fixed fingerprint."""
    w = (torch.arange(4 * 32).reshape(4, 32) % 13 - 6).float()
    assert fingerprint_of({"w": PackedTensor.quantize(w)}) == "deea4f60b16e458d"
