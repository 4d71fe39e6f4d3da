# SPDX-License-Identifier: Apache-2.0
"""Dequantization at the speed of memory: whole stacks without gaps to BF16 or FP16, bit-identical to the reference.

The eight magnitudes of a block are worked out by the reference's formula and looked up by byte permutation, instead of
decoding each code. A thread has four words of eight codes in flight and stores 16 bytes at once, neighbours next to
each other; threads exchange nothing. A program does one tile: walking over tiles takes a seventh longer. Other dtypes
and views are `weights_triton.dequantize_kernel`'s.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from vllm_quads.kernels.weights_triton import _e4m3_value, _word

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# $4: eight codes; $5 to $8: the magnitudes of codes 0 to 7 in 16 bits. The low bytes of four weights are permuted out
# of those of all magnitudes, the high bytes likewise, both are interleaved, and the signs put in.
_LOOK_UP = tl.constexpr(
    """
    {
    .reg .b32 low0, low1, high0, high1, select, next, a, b, c, d, s, t;
    prmt.b32 low0, $5, $6, 0x6420;
    prmt.b32 high0, $5, $6, 0x7531;
    prmt.b32 low1, $7, $8, 0x6420;
    prmt.b32 high1, $7, $8, 0x7531;
    and.b32 select, $4, 0x77777777;
    shr.u32 next, select, 16;
    prmt.b32 a, low0, low1, select;
    prmt.b32 b, high0, high1, select;
    prmt.b32 c, low0, low1, next;
    prmt.b32 d, high0, high1, next;
    shl.b32 s, $4, 12; and.b32 s, s, 0x8000;
    shl.b32 t, $4, 24; and.b32 t, t, 0x80000000; xor.b32 s, s, t;
    prmt.b32 $0, a, b, 0x5140; xor.b32 $0, $0, s;
    shl.b32 s, $4, 4; and.b32 s, s, 0x8000;
    shl.b32 t, $4, 16; and.b32 t, t, 0x80000000; xor.b32 s, s, t;
    prmt.b32 $1, a, b, 0x7362; xor.b32 $1, $1, s;
    shr.u32 s, $4, 4; and.b32 s, s, 0x8000;
    shl.b32 t, $4, 8; and.b32 t, t, 0x80000000; xor.b32 s, s, t;
    prmt.b32 $2, c, d, 0x5140; xor.b32 $2, $2, s;
    shr.u32 s, $4, 12; and.b32 s, s, 0x8000;
    and.b32 t, $4, 0x80000000; xor.b32 s, s, t;
    prmt.b32 $3, c, d, 0x7362; xor.b32 $3, $3, s;
    }
    """
)


@triton.jit
def _weight(code, t0, t1, t2, t3):
    """16 bits of a code (0 to 15), out of the table; what the assembly does, for the interpreter."""
    pair = tl.where(code & 4, tl.where(code & 2, t3, t2), tl.where(code & 2, t1, t0))
    return ((pair >> ((code & 1) * 16)) & 0xFFFF) ^ ((code & 8) << 12)


@triton.jit
def _two(codes, t0, t1, t2, t3):
    """A word of the two weights in the lowest byte."""
    return _weight(codes & 15, t0, t1, t2, t3) | (_weight((codes >> 4) & 15, t0, t1, t2, t3) << 16)


@triton.jit
def _fetch(codes, scales, start, words, T: tl.constexpr):
    """Codes of T words and the scale byte of each."""
    at = start + tl.arange(0, T)
    inside = at < words
    return tl.load(codes + at, mask=inside, other=0), tl.load(scales + (at >> 1), mask=inside, other=0)


@triton.jit
def _emit(values, start, codes, scale, decode, words, DTYPE: tl.constexpr, T: tl.constexpr):
    """Dequantize T words of codes and store four words of each."""
    scale = scale.to(tl.int32)
    # Negative scales exist in foreign files only; their sign counts all the same.
    s = _e4m3_value(scale & 0x7F).to(tl.int32, bitcast=True) ^ ((scale & 0x80) << 24)
    s = s.to(tl.float32, bitcast=True)
    t0 = _word((s * 0.0) * decode, (s * 0.5) * decode, DTYPE)
    t1 = _word(s * decode, (s * 1.5) * decode, DTYPE)
    t2 = _word((s * 2.0) * decode, (s * 3.0) * decode, DTYPE)
    t3 = _word((s * 4.0) * decode, (s * 6.0) * decode, DTYPE)
    if _INTERPRETED:
        a, b = _two(codes, t0, t1, t2, t3), _two(codes >> 8, t0, t1, t2, t3)
        c, d = _two(codes >> 16, t0, t1, t2, t3), _two(codes >> 24, t0, t1, t2, t3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _LOOK_UP,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, t0, t1, t2, t3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    out = tl.join(tl.join(a, c), tl.join(b, d)).reshape(4 * T)
    at = start * 4 + tl.arange(0, 4 * T)
    tl.store(values + at, out, mask=at < words * 4)


@triton.jit
def dequantize_stack_kernel(codes, scales, decode_scale, values, words, DTYPE: tl.constexpr, T: tl.constexpr):
    """(code value * block scale) * decode scale in BF16 (DTYPE 0) or FP16 (1); grid (tiles of 4 T words, matrices).

    codes: int32, `words` of eight a matrix; scales: uint8, half as many; values: int32 words of two. T: threads of a
    program; with as many words at a time no layout has to be converted.
    """
    matrix = tl.program_id(1)
    first = matrix.to(tl.int64) * words
    codes += first
    scales += first // 2
    values += first * 4
    decode = tl.load(decode_scale + matrix)
    start = tl.program_id(0) * (4 * T)
    # All loads come first: stores hold back what follows them.
    codes0, scale0 = _fetch(codes, scales, start, words, T)
    codes1, scale1 = _fetch(codes, scales, start + T, words, T)
    codes2, scale2 = _fetch(codes, scales, start + 2 * T, words, T)
    codes3, scale3 = _fetch(codes, scales, start + 3 * T, words, T)
    _emit(values, start, codes0, scale0, decode, words, DTYPE, T)
    _emit(values, start + T, codes1, scale1, decode, words, DTYPE, T)
    _emit(values, start + 2 * T, codes2, scale2, decode, words, DTYPE, T)
    _emit(values, start + 3 * T, codes3, scale3, decode, words, DTYPE, T)
