# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: equal exactly when names, codes and scales are equal, and additive over shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_quads.nvfp4 import (
    PackedTensor,
    fingerprint,
    fingerprint_of,
    matrix_digest,
    name_weights,
    packed_digest,
    tensor_digest,
    unit_digests,
    unit_fingerprint,
    unit_of,
)


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


@pytest.mark.parametrize("elements", [1, 2, 7, 2048, 2050, 70_001])
def test_digest_of_a_tensor(elements: int) -> None:
    """Of a tensor of any size its bytes count, and no shape or stride: one bit, two words that have changed places, and
    an element more make another digest."""
    a = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    others = [torch.cat((a, a.new_ones(1))), *(a.clone() for _ in range(3))]
    for other, at in zip(others[1:], (0, elements // 2, elements - 1), strict=True):
        other.view(torch.int16)[at] ^= 1
    if elements >= 2048:
        others.append(torch.cat((a[2:4], a[:2], a[4:])))
        others.append(a.roll(2))
    digests = {int(tensor_digest(t)) for t in others}
    assert int(tensor_digest(a)) not in digests
    forms = [a[None], a[:, None], torch.stack((a, a), dim=-1)[:, 0], torch.cat((a[:1], a))[1:]]
    assert {int(tensor_digest(t)) for t in forms} == {int(tensor_digest(a))}


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


@pytest.mark.parametrize("k", [16, 48])
def test_packed_shards_add_up(k: int) -> None:
    """Tensor-parallel shards of packed weights add up, cut in rows and at any multiple of 16 channels; the global scale
    is counted once."""
    full = PackedTensor.quantize(torch.randn(2, 12, 96, generator=torch.Generator().manual_seed(3)))
    total = torch.zeros(2, dtype=torch.int64)
    for rows in (slice(0, 5), slice(5, 12)):
        for channels in (slice(0, k), slice(k, 96)):
            shard = PackedTensor(
                full.codes[:, rows, channels.start // 2 : channels.stop // 2],
                full.block_scales[:, rows, channels.start // 16 : channels.stop // 16],
                full.decode_scale,
            )
            first = rows.start == 0 and channels.start == 0
            total += packed_digest(shard, row_offset=rows.start, k_offset=channels.start, count_global=first)
    assert torch.equal(total, packed_digest(full))


def test_units_add_up_over_expert_parallel_ranks() -> None:
    """A unit is what the rollout stores as one tensor; ranks that hold some experts each add up to its digest, and the
    fingerprint follows from the units."""
    head = "model.layers.3.mlp.experts"
    names = [f"{head}.{e}.{part}" for e in range(4) for part in ("gate_proj", "up_proj")]
    digests = {name: int(matrix_digest(_bytes(4, 8, seed=i))) for i, name in enumerate(names)}
    digests["model.layers.3.self_attn.q_proj"] = digests["model.layers.3.self_attn.k_proj"] = 5
    units = unit_digests(digests)
    assert units.keys() == {f"{head}.gate_up_proj", "model.layers.3.self_attn.qkv_proj"}
    assert unit_of(names[3]) == f"{head}.gate_up_proj"
    halves = [unit_digests({n: digests[n] for n in part})[f"{head}.gate_up_proj"] for part in (names[:4], names[4:])]
    assert sum(halves) % 2**64 == units[f"{head}.gate_up_proj"]
    stack = torch.tensor([digests[n] for n in names])
    assert int((stack * name_weights(names)).sum()) % 2**64 == units[f"{head}.gate_up_proj"]
    assert unit_fingerprint(units) == fingerprint(digests)


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
    assert fingerprint_of({"w": PackedTensor.quantize(w)}) == "fa5e42cdc4c67b5f"
    assert int(tensor_digest(w)) % 2**64 == 0x7B2201145F2D6991
