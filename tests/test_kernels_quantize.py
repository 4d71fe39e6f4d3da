# SPDX-License-Identifier: Apache-2.0
"""Activation quantization on Hopper in both output forms, bit for bit, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_quads.compensation.forms import Compensated, merged, quantize_with_residual
from vllm_quads.kernels.quantize import quantize_merged, quantize_packed
from vllm_quads.nvfp4 import BlockScaleRule, FormatError, unswizzle
from vllm_quads.nvfp4.formats import pack_codes

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])
FOUR = {BlockScaleRule.MAX_TO_SIX: False, BlockScaleRule.FOUR_OVER_SIX: True}


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Outlier channels, rows from 1e-38 to 1e30 (as far as dtype goes), ties, signed zeros, zero blocks, a zero row."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=gen) * torch.exp(1.5 * torch.randn(m, 1, generator=gen))
    x[:, :: max(k // 7, 1)] *= 30
    if m >= 16:
        x[1] = 0
        x[2, :16] = 0
        x[3] = (torch.randint(-24, 25, (k,), generator=gen) * 0.25).to(x)
        x[4] *= 1e-20
        x[5] *= 1e-38
        x[6] *= 1e28 if dtype is torch.bfloat16 else 100
        x[7] = torch.exp2(torch.randint(-12, 12, (k,), generator=gen).float())
        x[8, k // 2] = 3e4  # everything else lands on the smallest block scales, or on none
        x[0, ::3] = -0.0
    return x.to(dtype)


def reference_packed(c: Compensated, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [M, (K+S)/2] and scale bytes [M, (K+S)/16] of the appended form."""
    columns = (blocks.long()[:, None] * 16 + torch.arange(16, device=blocks.device)).flatten()
    codes = pack_codes(torch.cat((c.main.codes(), c.residual.codes()[:, columns]), dim=1))
    raw = [q.scales.view(torch.uint8) for q in c]
    return codes, torch.cat((raw[0], raw[1][:, blocks.long()]), dim=1)


# The reference runs on the GPU, where it has the bits that it has on a CPU (tests/test_rac_gpu.py). The last five
# shapes are large enough for the kernels of many rows.
SHAPES = [(0, 64), (1, 16), (1, 2048), (16, 48), (33, 192), (64, 576), (300, 768), (16, 5120), (17, 16384)]
SHAPES += [(5500, 768), (2100, 2048), (1100, 4096), (600, 7168), (260, 16384)]


@gpu
@pytest.mark.parametrize("rule", FOUR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_merged_form(m: int, k: int, dtype: torch.dtype, rule: BlockScaleRule, device: str) -> None:
    """Operands and decode scales of any number of rows equal the reference: no, some and all residuals, centring,
    static scales per group, rows that no group wants."""
    x = activations(m, k, dtype, m + k).to(device)
    gen = torch.Generator(device).manual_seed(1)
    mask = torch.rand(3, k // 16, generator=gen, device=device) < 0.4
    center = torch.randn(k, generator=gen, device=device) * 0.1
    group = torch.randint(0, 3, (m,), generator=gen, device=device, dtype=torch.int32)
    full = torch.rand(m, generator=gen, device=device) < 0.3
    static = torch.tensor([3.0, 700.0, 51.7], device=device)
    for use_center, g in ((False, None), (True, None), (True, static)):
        at = {"four_over_six": FOUR[rule], "center": center if use_center else None, "g": g}
        rows_g = None if g is None else g[group.long()][:, None]
        c = quantize_with_residual(x, rule=rule, center=center if use_center else None, g=rows_g)
        outputs = (
            quantize_merged(x, mask=mask, full=full, group=group, **at),  # type: ignore[arg-type]
            quantize_merged(x, group=group, **at),  # type: ignore[arg-type]
            quantize_merged(x, full_all=True, group=group, **at),  # type: ignore[arg-type]
        )
        chosen = (mask[group.long()] | full[:, None], torch.zeros(m, k // 16, dtype=torch.bool, device=device), None)
        for got, blocks in zip(outputs, chosen, strict=True):
            assert torch.equal(got.decode_scale, c.main.decode_scale.expand(m, 1)[:, 0])
            # -0 and +0 are the same operand: compared as numbers
            torch.testing.assert_close(got.values, merged(c, blocks), rtol=0, atol=0, equal_nan=True)


@gpu
@pytest.mark.parametrize("rule", FOUR)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(0, 32), (1, 64), (130, 768), (200, 2048), (17, 7168), (16, 16384)])
def test_packed_form(m: int, k: int, dtype: torch.dtype, swizzled: bool, rule: BlockScaleRule, device: str) -> None:
    """Codes and block scales, K + S appended, linear and 128x4 swizzled with zero padding, equal the reference byte for
    byte, with centring and with a static scale too."""
    x, center = activations(m, k, dtype, m).to(device), torch.linspace(-0.2, 0.2, k, device=device)
    some = torch.arange(1, k // 16, 3, dtype=torch.int32, device=device)
    for blocks in (some, some[:0]):
        for g in (None, torch.tensor([33.3], device=device)):
            c = quantize_with_residual(x, rule=rule, center=center, g=g)
            codes, scales = reference_packed(c, blocks)
            got = quantize_packed(x, blocks=blocks, four_over_six=FOUR[rule], center=center, g=g, swizzled=swizzled)
            linear = got.scales
            if swizzled:
                linear = unswizzle(linear.cpu(), m, k // 16 + blocks.numel()).to(device)
                assert int(got.scales.view(torch.uint8).to(torch.int64).sum()) == int(scales.to(torch.int64).sum())
            assert torch.equal(got.codes, codes)
            assert torch.equal(linear.view(torch.uint8), scales)
            assert torch.equal(got.decode_scale, c.main.decode_scale.expand(m, 1)[:, 0])


@gpu
@pytest.mark.parametrize("rule", FOUR)
def test_non_finite_rows(rule: BlockScaleRule, device: str) -> None:
    """NaN and Inf never become finite operands: scale bytes, codes and NaNs are those of the reference."""
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=device)
    x[0, 5], x[1, 20], x[2, 40], x[3, 3] = float("nan"), float("inf"), float("-inf"), 3.3e38
    x[3, 4] = -3.3e38
    blocks = torch.arange(4, dtype=torch.int32, device=device)
    for g in (None, torch.tensor([11.0], device=device)):
        c = quantize_with_residual(x, rule=rule, g=g)
        got = quantize_merged(x, full_all=True, four_over_six=FOUR[rule], g=g).values
        torch.testing.assert_close(got, merged(c), rtol=0, atol=0, equal_nan=True)
        assert bool(torch.isnan(got[0, :16]).all())
        assert bool(torch.isnan(got[1, 16:32]).all())
        packed = quantize_packed(x, blocks=blocks, four_over_six=FOUR[rule], g=g)
        codes, scales = reference_packed(c, blocks)
        assert torch.equal(packed.codes, codes)
        assert torch.equal(packed.scales.view(torch.uint8), scales)


@gpu
def test_close_choices_between_four_and_six(device: str) -> None:
    """Blocks whose two squared errors are equal or nearly so take the reference's side: small integers, where exact
    ties are common, at every magnitude."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randint(-6, 7, (4096, 256), generator=gen).float() * torch.exp2(
        torch.randint(-20, 20, (4096, 1), generator=gen).float()
    )
    x[:, 0] = x.abs().amax(dim=1) * 1.5
    rows = x.bfloat16().to(device)
    c = quantize_with_residual(rows, rule=BlockScaleRule.FOUR_OVER_SIX)
    got = quantize_packed(rows, four_over_six=True)
    assert torch.equal(got.scales.view(torch.uint8), c.main.scales.view(torch.uint8))
    assert torch.equal(got.codes, pack_codes(c.main.codes()))


@gpu
def test_rows_without_a_group_are_left_alone(device: str) -> None:
    """Rows of a negative group are not written, by the kernels of few and of many rows."""
    for m in (50, 5500):
        x = activations(m, 768, torch.bfloat16).to(device)
        group = torch.arange(m, device=device, dtype=torch.int32) % 2 - 1
        mask = torch.ones(1, 48, dtype=torch.bool, device=device)
        got = quantize_merged(x, mask=mask, group=group)
        want = merged(quantize_with_residual(x))
        assert torch.equal(got.values[1::2], want[1::2])


@pytest.mark.parametrize("form", [quantize_merged, quantize_packed])
def test_what_cannot_be_quantized_is_refused(form: type) -> None:
    """K that blocks do not divide, other dtypes, strided channels and misaligned rows are refused by name."""
    with pytest.raises(FormatError, match="K = 40 is not a multiple of 16"):
        form(torch.zeros(2, 40, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match="K = 0"):
        form(torch.zeros(2, 0, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match=r"x is torch\.float32"):
        form(torch.zeros(2, 64))
    with pytest.raises(FormatError, match="contiguous rows"):
        form(torch.zeros(64, 2, dtype=torch.bfloat16).T)
    with pytest.raises(FormatError, match="multiples of 16 bytes"):
        form(torch.zeros(2, 65, dtype=torch.bfloat16)[:, 1:])
