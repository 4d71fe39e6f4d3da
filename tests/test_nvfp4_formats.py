# SPDX-License-Identifier: Apache-2.0
"""Number formats: E2M1 and E4M3 rounding, codes and packing."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import (
    E2M1_VALUES,
    check_k,
    e2m1_codes,
    e2m1_decode,
    e2m1_round,
    e4m3_round,
    pack_codes,
    unpack_codes,
)

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


@pytest.mark.parametrize(("midpoint", "even"), TIES.items())
def test_e2m1_ties_go_to_the_even_mantissa(midpoint: float, even: float) -> None:
    """At each of the seven midpoints RNE picks the even code, and one ulp on either side picks the neighbour."""
    below, above = (np.nextafter(np.float32(midpoint), np.float32(d)) for d in (0.0, 9.0))
    lower = max(v for v in E2M1_VALUES if v < midpoint)
    upper = min(v for v in E2M1_VALUES if v > midpoint)
    y = torch.tensor([midpoint, -midpoint, float(below), float(above)])
    assert e2m1_round(y).tolist() == [even, -even, lower, upper]


def test_e2m1_saturates_and_keeps_signs_and_nan() -> None:
    """Above 5 everything is 6, Inf included; -0 and tiny negatives keep their sign; NaN stays NaN."""
    y = torch.tensor([5.0001, 7.0, 1e30, torch.inf, -torch.inf, -0.0, -1e-30])
    rounded = e2m1_round(y)
    assert rounded.tolist() == [6, 6, 6, 6, -6, 0, 0]
    assert torch.signbit(rounded[-2:]).all()
    assert torch.isnan(e2m1_round(torch.tensor([torch.nan]))).all()


def test_every_code_survives_decode_and_encode() -> None:
    """decode -> encode is the identity on all 16 codes."""
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_codes(e2m1_decode(codes)), codes)
    assert e2m1_decode(codes)[:8].tolist() == list(E2M1_VALUES)


def test_nan_has_one_code_whatever_its_sign() -> None:
    """Hardware differs in the sign of the NaN that it makes; the bytes must not."""
    nans = torch.tensor([0x7FC00000, -0x00400000], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(nans).all()
    assert e2m1_codes(nans).tolist() == [0, 0]


@given(st.floats(width=32, allow_nan=False))
def test_e2m1_rounding_is_the_nearest_value(y: float) -> None:
    """Exhaustive nearest search agrees on any float32."""
    assert int(e2m1_codes(e2m1_round(torch.tensor([y])))[0]) == oracle.e2m1_code(np.float32(y))


@given(st.floats(min_value=0.0, width=32, allow_nan=False))
def test_e4m3_rounding_is_the_nearest_value(y: float) -> None:
    """Exhaustive nearest search over the 127 finite values agrees on any non-negative float32."""
    assert int(e4m3_round(torch.tensor([y])).view(torch.uint8)[0]) == oracle.e4m3_byte(y)


def test_e4m3_rounding_at_every_midpoint() -> None:
    """All 126 midpoints between neighbours (ties) round to the even byte; subnormals included."""
    midpoints = (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2
    got = e4m3_round(torch.tensor(midpoints, dtype=torch.float32)).view(torch.uint8)
    assert (got % 2 == 0).all()
    assert got.tolist() == [oracle.e4m3_byte(m) for m in midpoints]


def test_e4m3_saturates_and_keeps_nan() -> None:
    """Values above 448, where torch's cast gives NaN or 448 depending on the release, saturate; NaN stays NaN."""
    assert e4m3_round(torch.tensor([464.0, 480.0, 1e9, torch.inf])).view(torch.uint8).tolist() == [0x7E] * 4
    assert e4m3_round(torch.tensor([torch.nan])).view(torch.uint8).tolist() == [0x7F]


def test_code_times_scale_is_exact_in_16_bit_formats() -> None:
    """q * s needs no rounding in BF16 nor in FP16 (all 8 x 127 products), which exact W4A4 emulation rests on."""
    products = torch.tensor(oracle.E2M1[:, None] * oracle.E4M3[None, :], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(products.to(dtype).to(torch.float64), products)
    assert not torch.equal(products.clamp(max=448).to(torch.float8_e4m3fn).to(torch.float64), products)


def test_packing_puts_even_k_into_the_low_nibble() -> None:
    """The byte order of every NVFP4 checkpoint: low nibble = even k."""
    assert pack_codes(torch.tensor([[0x1, 0xF, 0x8, 0x3]], dtype=torch.uint8)).tolist() == [[0xF1, 0x38]]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_packing_round_trip(codes: list[int]) -> None:
    """unpack is the inverse of pack."""
    tensor = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(tensor)), tensor)


@pytest.mark.parametrize("k", [0, 8, 24, 2047])
def test_k_must_be_a_multiple_of_16(k: int) -> None:
    """The message names the tensor, its K, and what to do."""
    with pytest.raises(FormatError, match=rf"layers.0.w: K = {k} .*keep this tensor in BF16"):
        check_k(k, "layers.0.w")
