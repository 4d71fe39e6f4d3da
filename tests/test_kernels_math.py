# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the CUDA quantizer (csrc/nvfp4_math.cuh), compiled for the host, is the reference bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_quads.compensation.forms import merged, quantize_with_residual
from vllm_quads.kernels._native import source_directory
from vllm_quads.nvfp4 import BlockScaleRule, encode_scale

SOURCE = """
#include "nvfp4_math.cuh"
#include <cstdint>
using namespace quads;
// x [blocks, 16], one global scale for all; p = q s, merged = p + qr sr, codes and scales of both quantizations
extern "C" void run(const float* x, int blocks, float amax, int four, float* decode_out, float* p, float* merged,
                    uint32_t* codes, uint8_t* scales, uint32_t* rcodes, uint8_t* rscales) {
  const float g = encode_scale(amax, four ? kRangeFourOverSix : kRangeMaxToSix);
  const RowScale row = row_scale(g);
  *decode_out = row.decode;
  for (int b = 0; b < blocks; ++b) {
    float v[16], q[16], main[16], r[16], qr[16];
    for (int i = 0; i < 16; ++i) v[i] = x[16 * b + i];
    const float m = amax16(v);
    const BlockScale s = four ? quantize_block<true>(v, m, row, q) : quantize_block<false>(v, m, row, q);
    residual_block(v, q, s.s, row.decode, main, r);
    const BlockScale sr = quantize_residual(r, row, qr);
    uint32_t words[2];
    block_codes(q, v, m == 0.0f || q[0] != q[0], words);
    codes[2 * b] = words[0], codes[2 * b + 1] = words[1];
    residual_codes(qr, r, v, qr[0] != qr[0], words);
    rcodes[2 * b] = words[0], rcodes[2 * b + 1] = words[1];
    scales[b] = (uint8_t)s.byte;
    rscales[b] = (uint8_t)sr.byte;
    for (int i = 0; i < 16; ++i) {
      const bool negative = bits(v[i]) >> 31;
      const float sum = fma_rn(qr[i], sr.s, main[i]);
      p[16 * b + i] = negative ? -main[i] : main[i];
      merged[16 * b + i] = negative ? -sum : sum;
    }
  }
}

static float nearest(float a) {  // by comparison with the midpoints, ties to even
  if (a <= 2.5f) return a <= 0.25f ? 0.f : a < 0.75f ? .5f : a <= 1.25f ? 1.f : a < 1.75f ? 1.5f : 2.f;
  return a < 3.5f ? 3.f : a <= 5.f ? 4.f : 6.f;
}

// number of floats in [0.125, 7) that one of the roundings gets wrong
extern "C" long wrong_roundings() {
  long wrong = 0;
  for (uint32_t u = bits(0.125f); u < bits(7.0f); ++u) {
    const float a = from_bits(u), want = nearest(a);
    wrong += e2m1_round(a) != want || (a <= 4.5f && e2m1_round_small(a) != want) || e2m1_round_signed(a) != want ||
             e2m1_round_signed(-a) != -want || e2m1_round_saturating(a) != want;
  }
  return wrong;
}
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    directory: Path = tmp_path_factory.mktemp("math")
    (directory / "math.cpp").write_text(SOURCE)
    library = directory / "math.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{source_directory()}"]
    subprocess.run([*command, str(directory / "math.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def run(native: ctypes.CDLL, x: Tensor, four: bool) -> dict[str, np.ndarray]:
    blocks = x.numel() // 16
    data = np.ascontiguousarray(x.numpy(), dtype=np.float32)
    out = {
        "decode": np.zeros(1, np.float32),
        "p": np.zeros(x.numel(), np.float32),
        "merged": np.zeros(x.numel(), np.float32),
        "codes": np.zeros(2 * blocks, np.uint32),
        "scales": np.zeros(blocks, np.uint8),
        "rcodes": np.zeros(2 * blocks, np.uint32),
        "rscales": np.zeros(blocks, np.uint8),
    }
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in out.values()]
    amax = ctypes.c_float(float(x.abs().max()))
    native.run(data.ctypes.data_as(ctypes.c_void_p), blocks, amax, int(four), *pointers)
    return out


def nibbles(words: np.ndarray) -> np.ndarray:
    return (words[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.uint8).ravel()


def cases() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    normal = torch.randn(64 * 512, generator=gen)
    return {
        "gaussian": normal,
        "bfloat16": normal.bfloat16().float(),
        "outliers": normal * torch.exp(2 * torch.randn(normal.numel(), generator=gen)),
        "ties": torch.randint(-96, 97, (16384,), generator=gen).float() / 16,
        "powers": torch.exp2(torch.randint(-40, 3, (16384,), generator=gen).float()),
        "tiny": normal * 1e-30,
        "subnormal": normal * 1e-41,
        "huge": normal.clamp(-3, 3) * 1e38,
        "signed zeros": torch.where(torch.rand(4096, generator=gen) < 0.9, torch.tensor(-0.0), normal[:4096]),
        "one block dominates": torch.cat((normal[:4096] * 1e-4, torch.full((16,), 448.0))),
        "zeros": torch.zeros(64),
    }


@pytest.mark.parametrize("rule", [BlockScaleRule.MAX_TO_SIX, BlockScaleRule.FOUR_OVER_SIX])
@pytest.mark.parametrize("case", cases())
def test_blocks_match_the_reference(native: ctypes.CDLL, case: str, rule: BlockScaleRule) -> None:
    """Codes, block scales, global scale and merged operand of main quantization and residual equal the reference."""
    x = cases()[case]
    got = run(native, x, rule is BlockScaleRule.FOUR_OVER_SIX)
    row = x[None]
    c = quantize_with_residual(row, rule=rule)
    assert got["decode"][0] == float(c.main.decode_scale)
    assert float(1 / encode_scale(row.abs().amax(), rule)) == float(c.main.decode_scale)
    for name, q in (("", c.main), ("r", c.residual)):
        assert np.array_equal(got[f"{name}scales"], q.scales.view(torch.uint8).numpy().ravel())
        assert np.array_equal(nibbles(got[f"{name}codes"]), q.codes().numpy().ravel())
    assert np.array_equal(got["p"], c.main.scaled().numpy().ravel())
    assert np.array_equal(got["merged"].astype(np.float16), merged(c).numpy().ravel())


def test_non_finite_blocks_decode_to_nan(native: ctypes.CDLL) -> None:
    """A block with NaN or Inf gets the NaN block scale, as in the reference; its neighbours keep theirs."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    x[3] = float("nan")
    got = run(native, x, False)
    assert got["scales"][0] == 0x7F
    assert np.isnan(got["p"][:16]).all()


def test_every_float_rounds_to_the_nearest_e2m1_value(native: ctypes.CDLL) -> None:
    """All roundings to E2M1 that the kernels use agree with the midpoints, ties to even, for every float32 in range."""
    native.wrong_roundings.restype = ctypes.c_long
    assert native.wrong_roundings() == 0
