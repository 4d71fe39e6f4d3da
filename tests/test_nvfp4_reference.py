# SPDX-License-Identifier: Apache-2.0
"""The reference quant-dequant path against an independent oracle, and its behaviour at the edges."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_quads.nvfp4 import (
    BlockScaleRule,
    FormatError,
    PackedTensor,
    encode_scale,
    fake_quantize_weight,
    quantize_activation,
    quantize_blocks,
    quantize_weight,
    weight_amax,
)

SIX, FOUR = BlockScaleRule.MAX_TO_SIX, BlockScaleRule.FOUR_OVER_SIX


def _bytes(q) -> tuple[np.ndarray, np.ndarray]:
    return q.codes().numpy(), q.scales.view(torch.uint8).numpy()


def _assert_same(q, expected: tuple[np.ndarray, np.ndarray]) -> None:
    codes, scales = _bytes(q)
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(codes, expected[0])


def _data(kind: str, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if kind == "heavy":
        x = x * torch.exp(2 * torch.randn(shape, generator=g))
    elif kind == "integers":  # lands on ties
        x = torch.randint(-8, 9, shape, generator=g).float()
    elif kind == "wide":  # row amax from 1e-9 to 1e6: subnormal and zero block scales
        x = x * torch.logspace(-9, 6, shape[0])[:, None]
    return x.to(torch.bfloat16).float()


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "integers", "wide"])
@pytest.mark.parametrize("rule", [SIX, FOUR])
def test_bits_equal_the_oracle(kind: str, rule: BlockScaleRule) -> None:
    """Codes and block scales equal a nearest-value search in numpy, with one global scale and with one per token."""
    x = _data(kind, (16, 64))
    four = rule is FOUR
    amax = float(x.abs().max())
    _assert_same(
        quantize_blocks(x, encode_scale(torch.tensor(amax), rule), rule), oracle.quantize(x.numpy(), None, four)
    )
    per_row = np.array([oracle.global_scale(float(a), rule.range) for a in x.abs().amax(dim=1)])
    _assert_same(quantize_activation(x, rule=rule), oracle.quantize(x.numpy(), per_row, four))


def _bf16_bits(bits: int) -> float:
    """The BF16 value of 16 bits, with the exponent limited to 2^-28 .. 2^27: finite, and sums of squares stay so."""
    sign, exponent, mantissa = bits >> 15, (bits >> 7) & 0xFF, bits & 0x7F
    return (-1.0 if sign else 1.0) * (1 + mantissa / 128) * 2.0 ** (exponent % 56 - 28)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=16, max_size=16), st.integers(0, 0x7FFF), st.booleans())
def test_bits_equal_the_oracle_on_any_block(bits: list[int], g_bits: int, four: bool) -> None:
    """Any finite BF16 block under any ordinary static global scale, saturated and vanishing blocks included."""
    x = np.array([[_bf16_bits(b) for b in bits]], dtype=np.float32)
    g = np.float32(_bf16_bits(g_bits))
    got = quantize_blocks(torch.from_numpy(x), torch.tensor(g), FOUR if four else SIX)
    _assert_same(got, oracle.quantize(x, np.array([g]), four))


def test_error_bound_in_float64() -> None:
    """|x - dequantized| stays within half the coarsest E2M1 step plus the rounding of the block scale."""
    x = _data("gaussian", (32, 128))
    q = quantize_blocks(x, encode_scale(x.abs().max()))
    exact = oracle.dequantize(*_bytes(q), float(q.decode_scale))
    m = np.repeat(x.abs().unflatten(-1, (-1, 16)).amax(-1).numpy(), 16, axis=1)
    # The coarsest step is 2 of 6; E4M3 rounds the block scale by at most 1/16, which also bounds what saturates.
    assert (np.abs(x.numpy() - exact) <= m * (1 / 6 + 1 / 16 + 1 / 96)).all()
    np.testing.assert_allclose(q.dequantize().numpy(), exact, rtol=3e-7)


def test_encode_scale_edges() -> None:
    """2688 / amax, 1 for a zero tensor, capped at FLT_MAX for a tiny one, garbage stays garbage."""
    g = encode_scale(torch.tensor([1.0, 0.0, 1e-38, torch.nan, torch.inf]))
    assert g[:3].tolist() == [2688.0, 1.0, torch.finfo(torch.float32).max]
    assert torch.isnan(g[3])
    assert g[4] == 0
    assert encode_scale(torch.tensor(1.0), FOUR) == 6 * 256


def test_zero_block_is_all_zero_bytes() -> None:
    """A zero block (of +0 or -0) beside a live one: scale 0x00 and codes 0x0, decoding to zero."""
    x = torch.ones(1, 48)
    x[0, 16:32] = 0.0
    x[0, 32:] = -0.0
    for rule in (SIX, FOUR):
        q = quantize_blocks(x, encode_scale(torch.tensor(1.0), rule), rule)
        assert q.scales.view(torch.uint8)[0, 1:].tolist() == [0, 0]
        assert q.codes()[0, 16:].eq(0).all()
        assert q.dequantize()[0, 16:].eq(0).all()


def test_zero_tensor_has_scale_one_and_zero_bytes() -> None:
    """A zero tensor quantizes to zeros with global scale 1, not to NaN."""
    q = quantize_weight(torch.zeros(4, 32))
    assert float(q.decode_scale) == 1.0
    assert q.codes().eq(0).all()
    assert q.scales.view(torch.uint8).eq(0).all()
    assert quantize_activation(torch.zeros(2, 32)).dequantize().eq(0).all()


def test_underflowing_block_decodes_to_zero() -> None:
    """A block whose scale rounds to 0 decodes to exact zeros, never to Inf or NaN."""
    x = torch.full((1, 32), 1.0)
    x[0, 16:] = 1e-6
    q = quantize_blocks(x, encode_scale(x.abs().max()))
    assert q.scales.view(torch.uint8)[0, 1] == 0
    assert q.dequantize()[0, 16:].eq(0).all()


def test_small_row_is_not_flushed() -> None:
    """A matrix whose rows have amax 1e-5 keeps its values to FP4 accuracy (some QAT kernels zero it)."""
    w = _data("gaussian", (8, 64)) * 1e-5 / 3
    rel = (fake_quantize_weight(w) - w).norm() / w.norm()
    assert 0.05 < rel < 0.13


def test_row_of_amax_1e_5_beside_ordinary_rows() -> None:
    """The trainer's fake-quantized row and the packed bytes agree where one row is far smaller than the rest."""
    w = _data("gaussian", (8, 64)) * 0.02
    w[3] = w[3] / w[3].abs().max() * 1e-5
    packed = PackedTensor.quantize(w)
    assert torch.equal(fake_quantize_weight(w), packed.dequantize())
    assert torch.isfinite(packed.dequantize()).all()
    assert packed.dequantize()[3].abs().max() > 0  # subnormal block scales, still alive


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", [SIX, FOUR])
def test_bad_activation_block_decodes_to_nan(bad: float, rule: BlockScaleRule) -> None:
    """NaN or Inf in a block gives the NaN scale byte 0x7F and NaN values; with a static scale other blocks live on."""
    x = torch.ones(2, 32)
    x[0, 5] = bad
    q = quantize_blocks(x, encode_scale(torch.tensor(1.0), rule), rule)
    assert q.scales.view(torch.uint8)[0, 0] == 0x7F
    value = q.dequantize()
    assert torch.isnan(value[0, :16]).all()
    assert torch.isfinite(value[0, 16:]).all()
    assert torch.isfinite(value[1]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_activation_token_never_becomes_finite(bad: float) -> None:
    """With per-token scales the token that holds NaN or Inf decodes to NaN throughout; its neighbours are untouched."""
    x = _data("gaussian", (3, 32))
    clean = quantize_activation(x).dequantize()
    x[1, 20] = bad
    value = quantize_activation(x).dequantize()
    assert torch.isnan(value[1]).all()
    assert torch.equal(value[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("amax", [None, torch.tensor(1.0)])
def test_bad_weight_is_refused_by_name(bad: float, amax: torch.Tensor | None) -> None:
    """NaN or Inf in a weight is an error that names it, also when the amax comes from elsewhere."""
    w = torch.ones(4, 32)
    w[2, 7] = bad
    with pytest.raises(FormatError, match="model.layers.0.w: holds NaN or Inf"):
        PackedTensor.quantize(w, amax=amax, name="model.layers.0.w")


def test_fp32_master_and_bf16_copy_give_the_same_bytes() -> None:
    """The trainer's FP32 master and the BF16 copy that a rollout receives quantize to the same bytes."""
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)) * 0.02
    a, b = PackedTensor.quantize(w), PackedTensor.quantize(w.to(torch.bfloat16))
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.block_scales.view(torch.uint8), b.block_scales.view(torch.uint8))
    assert torch.equal(a.decode_scale, b.decode_scale)
    assert torch.equal(weight_amax(w), weight_amax(w.to(torch.bfloat16)))


def test_given_amax_sets_the_global_scale() -> None:
    """Siblings (gate and up) quantized with their joint amax share one global scale, bit for bit."""
    gate, up = _data("gaussian", (8, 32)), 3 * _data("gaussian", (8, 32), 1)
    joint = torch.maximum(weight_amax(gate), weight_amax(up))
    a, b = PackedTensor.quantize(gate, amax=joint), PackedTensor.quantize(up, amax=joint)
    stacked = PackedTensor.quantize(torch.cat((gate, up)))
    assert a.decode_scale == b.decode_scale == stacked.decode_scale
    assert torch.equal(torch.cat((a.codes, b.codes)), stacked.codes)


def test_stack_of_experts_equals_its_matrices() -> None:
    """[E, N, K] quantizes with one global scale per expert, as the experts one by one."""
    w = _data("heavy", (3 * 8, 32)).reshape(3, 8, 32)
    stack = PackedTensor.quantize(w)
    assert stack.decode_scale.shape == (3,)
    for e in range(3):
        one = PackedTensor.quantize(w[e])
        assert torch.equal(stack.codes[e], one.codes)
        assert stack.decode_scale[e] == one.decode_scale


def test_four_over_six_never_has_the_larger_error() -> None:
    """Per block, at one global scale, the rule's squared error is at most that of mapping to six, and often smaller."""
    x = _data("gaussian", (64, 64))
    g = encode_scale(x.abs().max(), FOUR)

    def error(rule: BlockScaleRule) -> torch.Tensor:
        return (x - quantize_blocks(x, g, rule).dequantize()).unflatten(-1, (-1, 16)).square().sum(-1)

    assert (error(FOUR) <= error(SIX) * (1 + 1e-6)).all()
    assert error(FOUR).sum() < 0.95 * error(SIX).sum()


def test_centre_is_subtracted_before_the_token_scale() -> None:
    """With a centre the token's amax is that of the centred row."""
    x, c = _data("gaussian", (4, 32)) + 5.0, torch.full((32,), 5.0)
    a, b = quantize_activation(x, center=c), quantize_activation(x - c)
    assert torch.equal(a.values, b.values)
    assert torch.equal(a.decode_scale, b.decode_scale)


def test_quantizing_what_was_dequantized_changes_nothing() -> None:
    """A refit of already quantized weights (BF16 copies of the dequantized values) keeps the codes' meaning."""
    w = _data("gaussian", (16, 64)) * 0.02
    once = fake_quantize_weight(w.to(torch.bfloat16))
    twice = fake_quantize_weight(once)
    # BF16 rounding of the dequantized value is the only difference: at most one BF16 ulp.
    assert ((once.float() - twice.float()).abs() <= once.float().abs() * 2**-7).all()


def test_trainer_export_and_operand_hold_the_same_bits() -> None:
    """fake-quantized weight == dequantized packed bytes == (exact BF16 operand) * global scale."""
    w = _data("heavy", (32, 64)) * 0.01
    packed = PackedTensor.quantize(w)
    operand = packed.scaled().to(torch.bfloat16)
    assert torch.equal(operand.float(), packed.scaled())
    assert torch.equal(fake_quantize_weight(w), operand.float() * packed.decode_scale)
    assert torch.equal(fake_quantize_weight(w), packed.dequantize())
