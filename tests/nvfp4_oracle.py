# SPDX-License-Identifier: Apache-2.0
"""Slow NVFP4 in numpy and plain Python, written from the formula and from nothing of `vllm_quads`.

Rounding is an exhaustive search for the nearest grid value in float64 (exact for these operands); the float32
operations of the formula are numpy's, one IEEE rounding each.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
FLT_MAX = F32(np.finfo(np.float32).max)
ONE_SIXTH = F32(1.0 / 6.0)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e4m3_grid() -> np.ndarray:
    """The 127 finite non-negative E4M3 values by byte (OCP 8-bit floating point: bias 7, no infinity)."""
    return np.array([(b & 7) / 8 * 2.0**-6 if b < 8 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in range(127)])


E4M3 = _e4m3_grid()


def nearest(y: float, grid: np.ndarray) -> int:
    """Index of the grid value nearest to y >= 0; a tie goes to the even index (even mantissa), overflow to the last."""
    distance = np.abs(grid - float(y))
    best = np.flatnonzero(distance == distance.min())
    return int(best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1])


def e2m1_code(y: float) -> int:
    """4-bit code of any y that is not NaN."""
    return nearest(min(abs(float(y)), 6.0), E2M1) | (8 if np.signbit(y) else 0)


def e4m3_byte(y: float) -> int:
    """E4M3 byte of y >= 0, saturating at 448; NaN gives 0x7F."""
    return 0x7F if np.isnan(y) else nearest(min(float(y), 448.0), E4M3)


def global_scale(amax: float, numerator: float = 2688.0) -> np.float32:
    with np.errstate(over="ignore", divide="ignore"):
        return F32(1.0) if amax == 0 else min(F32(numerator) / F32(amax), FLT_MAX)


def _codes(block: np.ndarray, m: np.float32, scale_byte: int, decode: np.float32) -> list[int]:
    if m == 0:
        return [0] * 16
    with np.errstate(over="ignore", divide="ignore"):
        o = min(F32(1.0) / (F32(E4M3[scale_byte]) * decode), FLT_MAX)
        return [e2m1_code(F32(x) * o) for x in block]


def _value(code: int) -> float:
    return float(-E2M1[code & 7] if code & 8 else E2M1[code & 7])


def _squared_error(block: np.ndarray, codes: list[int], scale_byte: int, decode: np.float32) -> np.float32:
    """Float32, summed by halves, as `quantize_blocks` documents it."""
    e = [F32(x) - (F32(_value(c)) * F32(E4M3[scale_byte])) * decode for x, c in zip(block, codes, strict=True)]
    e = [v * v for v in e]
    while len(e) > 1:
        half = len(e) // 2
        e = [e[i] + e[i + half] for i in range(half)]
    return e[0]


def quantize_block(block: np.ndarray, g: np.float32, four_over_six: bool = False) -> tuple[list[int], int]:
    """(16 codes, block scale byte) of 16 finite float32 values."""
    m = np.abs(block.astype(np.float32)).max()
    decode = F32(1.0) / g
    with np.errstate(over="ignore"):
        sf = m * (g * ONE_SIXTH)
        byte6 = e4m3_byte(sf)
        codes6 = _codes(block, m, byte6, decode)
        if not four_over_six:
            return codes6, byte6
        byte4 = e4m3_byte(sf * F32(1.5))
    codes4 = _codes(block, m, byte4, decode)
    if _squared_error(block, codes4, byte4, decode) < _squared_error(block, codes6, byte6, decode):
        return codes4, byte4
    return codes6, byte6


def quantize(x: np.ndarray, g: np.ndarray | None = None, four_over_six: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K] and scale bytes [M, K/16] of float32 x [M, K]; g [M] or None for one scale over all of x."""
    if g is None:
        g = np.full(x.shape[0], global_scale(float(np.abs(x).max()), 1536.0 if four_over_six else 2688.0))
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    for row in range(x.shape[0]):
        for b in range(x.shape[1] // 16):
            part = slice(16 * b, 16 * b + 16)
            codes[row, part], scales[row, b] = quantize_block(x[row, part], F32(g[row]), four_over_six)
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, decode: float) -> np.ndarray:
    """code * block scale * decode scale in float64 [M, K]: exact up to float64."""
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    return values * np.repeat(E4M3[scales], 16, axis=-1) * decode
