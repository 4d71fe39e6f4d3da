# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over stacks of weight matrices, bit-identical to `vllm_quads.nvfp4.reference`.

Two weights are one machine word (int32 for BF16 and FP16, int64 for FP32): a block of 16 is a row of eight words, and
the two nibbles of a code byte come from one word: nothing is interleaved or split. A tile is [BLOCKS, 8] words. The
grid is (programs, matrices); a program walks over the tiles of its matrix. DTYPE is 0 for BF16, 1 for FP16, 2 for FP32.
Nothing needs FP8 or FP4 instructions.

All roundings to E4M3, E2M1 and BF16 are done by hand, in integers or with exact additions: Triton's interpreter, in
which these kernels are checked on a CPU, rounds those casts differently from hardware. Launch with
`enable_fp_fusion=False`: every operation is one IEEE rounding.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

CLASSES = 16
"""Classes of tiles with a checksum of their own."""


_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _round_bf16(x):
    """float32 rounded to BF16, ties to even, kept as float32; NaN stays NaN."""
    u = x.to(tl.int32, bitcast=True)
    r = (u + 0x7FFF + ((u >> 16) & 1)) & -65536
    r = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, r)
    return r.to(tl.float32, bitcast=True)


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """The even and the odd element of each word, as float32."""
    if DTYPE == 0:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    elif DTYPE == 1:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = words.to(tl.int32).to(tl.float32, bitcast=True)
        high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The even and the odd element of each word's BF16 copy, as float32."""
    low, high = _unpack(words, DTYPE)
    if DTYPE != 0:
        low, high = _round_bf16(low), _round_bf16(high)
    return low, high


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    """Two float32 values rounded to the dtype, in one word."""
    if DTYPE == 0 and _INTERPRETED:
        a = _round_bf16(low).to(tl.int32, bitcast=True)
        b = _round_bf16(high).to(tl.int32, bitcast=True)
        return ((a >> 16) & 0xFFFF) | b
    elif DTYPE == 0:
        a = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        b = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        return (a & 0xFFFF) | (b << 16)
    elif DTYPE == 1:
        a = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (a & 0xFFFF) | (b << 16)
    else:
        a = low.to(tl.int32, bitcast=True).to(tl.int64)
        b = high.to(tl.int32, bitcast=True).to(tl.int64)
        return (a & 0xFFFFFFFF) | (b << 32)


@triton.jit
def _global_scale(amax):
    """Encode global scale g = 2688 / amax, at most FLT_MAX, 1 where amax is 0; and 1 / g."""
    g = tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), amax)
    g = tl.where(g > 3.4028234663852886e38, 3.4028234663852886e38, g)
    g = tl.where(amax == 0, 1.0, g)
    return g, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), g)


@triton.jit
def _e4m3_byte(x):
    """E4M3 byte of a non-negative float32: ties to even, saturating at 448; NaN gives 0x7F."""
    u = x.to(tl.int32, bitcast=True)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the grid has steps of 2^-9: adding 2^14 rounds to one.
    small = (((x + 16384.0) - 16384.0) * 512.0).to(tl.int32)
    byte = tl.where(x < 0.015625, small, normal)
    byte = tl.where(x >= 448.0, 0x7E, byte)
    return tl.where(x == x, byte, 0x7F)


@triton.jit
def _e4m3_value(byte):
    """float32 value of a non-negative E4M3 byte (int32). The bits are those of a float32, times 2^-120."""
    value = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(byte == 0x7F, float("nan"), value)


@triton.jit
def _block_scale(m_bits, k, decode):
    """Scale byte, its value s and the multiplier o = min(1 / (s * decode), FLT_MAX) of blocks with these amax bits."""
    m = m_bits.to(tl.float32, bitcast=True)
    sf = m * k
    byte = tl.where((m_bits < 0x7F800000) & (sf >= 0), _e4m3_byte(sf), 0x7F)
    s = _e4m3_value(byte)
    o = tl.div_rn(tl.full(m.shape, 1.0, tl.float32), s * decode)
    return byte, s, tl.where(o > 3.4028234663852886e38, 3.4028234663852886e38, o)


@triton.jit
def _e2m1(x, o):
    """|x * o| rounded to E2M1, saturating at 6: its code (0 to 7) and its value.

    Adding and subtracting 1.5 * 2^22, 2^23 or 2^24 rounds to a multiple of 0.5, 1 or 2, the step of the grid around y;
    the low bits of the sum count the steps.
    """
    y = tl.minimum(tl.abs(x * o), 6.0)
    e = tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    magic = (e + 0x0B400000).to(tl.float32, bitcast=True)
    sum = y + magic
    code = (sum.to(tl.int32, bitcast=True) + (e >> 22) + 2) & 7
    return code, sum - magic


@triton.jit
def _signed(magnitude, x, sign_mask):
    """magnitude with the sign of x, where sign_mask lets it through."""
    sign = x.to(tl.int32, bitcast=True) & sign_mask
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _place(block, per_row, row_stride, width: tl.constexpr, FLAT: tl.constexpr):
    """Offset of the first word (or byte) of each block within its matrix."""
    if FLAT:
        return block * width
    else:
        row = block // per_row
        return row * row_stride + (block - row * per_row) * width


@triton.jit
def _tiles(blocks, guard, BLOCKS: tl.constexpr, GUARDED: tl.constexpr):
    """Number of tiles to walk over; 0 if the guard says that there is nothing to do."""
    tiles = tl.cdiv(blocks, BLOCKS)
    if GUARDED:
        tiles = tl.where(tl.load(guard) != 0, tiles, 0)
    return tiles


@triton.jit
def _word_amax(words, DTYPE: tl.constexpr):
    """Larger magnitude of each word's two elements, as the bits of the dtype; NaN is largest."""
    if DTYPE == 2:
        return tl.maximum(words.to(tl.int32) & 0x7FFFFFFF, (words >> 32).to(tl.int32) & 0x7FFFFFFF)
    else:
        return tl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF)


@triton.jit
def _store_amax(best, out, DTYPE: tl.constexpr):
    """Maximum over `best`, rounded to BF16, into out as float32 bits."""
    top = tl.max(tl.max(best, axis=1), axis=0)
    if DTYPE == 0:
        top = top << 16
    elif DTYPE == 1:
        value = top.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        top = _round_bf16(value).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        top = _round_bf16(top.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    tl.atomic_max(out, top)


@triton.jit
def amax_kernel(
    x,
    out,
    blocks,
    per_row,
    x_matrix,
    x_row,
    DTYPE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """max |BF16(x)| of each matrix as float32 bits, by integer maximum into out (which starts at 0)."""
    matrix = tl.program_id(1)
    x += matrix.to(tl.int64) * x_matrix
    j = tl.arange(0, 8)[None, :]
    lane = tl.arange(0, BLOCKS)
    best = tl.zeros((BLOCKS, 8), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, BLOCKS), tl.num_programs(0)):
        block = tile * BLOCKS + lane
        at = _place(block, per_row, x_row, 8, FLAT)[:, None] + j
        words = tl.load(x + at, mask=(block < blocks)[:, None], other=0)
        best = tl.maximum(best, _word_amax(words, DTYPE))
    _store_amax(best, out + matrix, DTYPE)


@triton.jit
def checksum_kernel(
    x,
    out,
    sums,
    guard,
    blocks,
    per_row,
    x_matrix,
    x_row,
    salt,
    first,
    last,
    DTYPE: tl.constexpr,
    FLAT: tl.constexpr,
    AMAX: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Adds position-weighted sums of words to sums[c], of tiles of the classes first <= c < last (tile modulo 16).

    Weights are odd, so a change of one word always changes a sum. AMAX: the amax of what was read as well.
    """
    matrix = tl.program_id(1)
    x += matrix.to(tl.int64) * x_matrix
    j = tl.arange(0, 8)[None, :]
    lane = tl.arange(0, BLOCKS)
    best = tl.zeros((BLOCKS, 8), tl.int32)
    origin = matrix * 0x05EBCA6B + salt
    tiles = _tiles(blocks, guard, BLOCKS, GUARDED)
    # As a rule a program has tiles of one class only, for a sum over its threads takes as long as some tiles.
    classes = last - first
    own, group = tl.program_id(0) % classes, tl.program_id(0) // classes
    groups = tl.cdiv(tl.num_programs(0) - own, classes)
    for c in range(first + own, last, tl.num_programs(0)):
        total = tl.zeros((BLOCKS, 8), tl.int64)
        for tile in range(c + 16 * group, tiles, 16 * groups):
            block = tile * BLOCKS + lane
            at = _place(block, per_row, x_row, 8, FLAT)[:, None] + j
            words = tl.load(x + at, mask=(block < blocks)[:, None], other=0)
            weight = (block[:, None] * 8 + j) * 0x2545F491 + origin
            weight = (weight ^ (weight >> 15)) | 1
            total += words.to(tl.int64) * weight.to(tl.int64)
            if AMAX:
                best = tl.maximum(best, _word_amax(words, DTYPE))
        tl.atomic_add(sums + c, tl.sum(tl.sum(total, axis=1), axis=0))
    if AMAX:
        _store_amax(best, out + matrix, DTYPE)


@triton.jit
def compare_kernel(kept, fresh, stale, amax, matrices, first, last):
    """stale = 1 if fresh[first:last] differs from kept, else 0; clears fresh, and where stale kept and amax too."""
    c = tl.arange(0, 16)
    different = (tl.load(fresh + c) != tl.load(kept + c)) & (c >= first) & (c < last)
    any_different = tl.max(different.to(tl.int32), axis=0)
    tl.store(stale, any_different)
    zero = tl.zeros((16,), tl.int64)
    tl.store(fresh + c, zero)
    tl.store(kept + c, zero, mask=c < 16 * any_different)
    lane = tl.arange(0, 256)
    for start in range(0, matrices, 256):
        inside = start + lane < matrices * any_different
        tl.store(amax + start + lane, tl.zeros((256,), tl.int32), mask=inside)


@triton.jit
def quantize_kernel(
    x,
    amax,
    codes,
    scales,
    decode_scale,
    values,
    guard,
    blocks,
    per_row,
    x_matrix,
    x_row,
    c_matrix,
    c_row,
    s_matrix,
    s_row,
    v_matrix,
    v_row,
    DTYPE: tl.constexpr,
    PACK: tl.constexpr,
    VALUES: tl.constexpr,
    FLAT: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantize: codes, block scales and decode scales if PACK, dequantized values in x's dtype if VALUES."""
    matrix = tl.program_id(1)
    wide = matrix.to(tl.int64)
    x += wide * x_matrix
    codes += wide * c_matrix
    scales += wide * s_matrix
    values += wide * v_matrix
    g, decode = _global_scale(tl.load(amax + matrix))
    k = g * 0.1666666716337204
    tiles = _tiles(blocks, guard, BLOCKS, GUARDED)
    if PACK:
        tl.store(decode_scale + matrix, decode, mask=(tl.program_id(0) == 0) & (tiles > 0))
    j = tl.arange(0, 8)[None, :]
    lane = tl.arange(0, BLOCKS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        block = tile * BLOCKS + lane
        valid = block < blocks
        inside = valid[:, None]
        words = tl.load(x + _place(block, per_row, x_row, 8, FLAT)[:, None] + j, mask=inside, other=0)
        low, high = _halves(words, DTYPE)
        low_bits = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        high_bits = high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        m_bits = tl.max(tl.maximum(low_bits, high_bits), axis=1)
        byte, s, o = _block_scale(m_bits, k, decode)
        # A zero block is all +0; elsewhere zeros keep their sign.
        sign_mask = tl.where(m_bits == 0, 0, -2147483648)[:, None]
        code_low, q_low = _e2m1(low, o[:, None])
        code_high, q_high = _e2m1(high, o[:, None])
        if PACK:
            sign_low = ((low.to(tl.int32, bitcast=True) & sign_mask) >> 28) & 8
            sign_high = ((high.to(tl.int32, bitcast=True) & sign_mask) >> 24) & 0x80
            packed = code_low | sign_low | (code_high << 4) | sign_high
            at = _place(block, per_row, c_row, 8, FLAT)[:, None] + j
            tl.store(codes + at, packed.to(tl.uint8), mask=inside)
            tl.store(scales + _place(block, per_row, s_row, 1, FLAT), byte.to(tl.uint8), mask=valid)
        if VALUES:
            low = _signed((q_low * s[:, None]) * decode, low, sign_mask)
            high = _signed((q_high * s[:, None]) * decode, high, sign_mask)
            at = _place(block, per_row, v_row, 8, FLAT)[:, None] + j
            tl.store(values + at, _word(low, high, DTYPE), mask=inside)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    decode_scale,
    values,
    blocks,
    per_row,
    c_matrix,
    c_row,
    s_matrix,
    s_row,
    v_matrix,
    v_row,
    DTYPE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(code value * block scale) * decode scale in the dtype."""
    matrix = tl.program_id(1)
    wide = matrix.to(tl.int64)
    codes += wide * c_matrix
    scales += wide * s_matrix
    values += wide * v_matrix
    decode = tl.load(decode_scale + matrix)
    j = tl.arange(0, 8)[None, :]
    lane = tl.arange(0, BLOCKS)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, BLOCKS), tl.num_programs(0)):
        block = tile * BLOCKS + lane
        valid = block < blocks
        inside = valid[:, None]
        # Four bytes a thread, as many as the words that it stores: no exchange between threads.
        at = tl.max_contiguous(_place(block, per_row, c_row, 8, FLAT)[:, None] + j, (1, 4))
        byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales + _place(block, per_row, s_row, 1, FLAT), mask=valid, other=0).to(tl.int32)
        # Negative scales exist in foreign files only; their sign counts all the same.
        s = _signed(_e4m3_value(scale & 0x7F), (scale << 24).to(tl.float32, bitcast=True), -2147483648)[:, None]
        # The three magnitude bits are the top of a float32's exponent and fraction, times 2^-126.
        low = (((byte & 7) << 22) | ((byte & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        high = (((byte & 0x70) << 18) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        at = _place(block, per_row, v_row, 8, FLAT)[:, None] + j
        tl.store(values + at, _word((low * s) * decode, (high * s) * decode, DTYPE), mask=inside)


@triton.jit
def clamp_gradient_kernel(
    grad,
    x,
    amax,
    out,
    blocks,
    DTYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """grad where |BF16(x)| <= 6 * block scale * decode scale, else grad * 0; contiguous matrices."""
    matrix = tl.program_id(1)
    start = matrix.to(tl.int64) * blocks * 8
    g, decode = _global_scale(tl.load(amax + matrix))
    k = g * 0.1666666716337204
    j = tl.arange(0, 8)[None, :]
    lane = tl.arange(0, BLOCKS)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, BLOCKS), tl.num_programs(0)):
        block = tile * BLOCKS + lane
        inside = (block < blocks)[:, None]
        at = start + block[:, None] * 8 + j
        low, high = _halves(tl.load(x + at, mask=inside, other=0), DTYPE)
        low_bits = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        high_bits = high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        _, s, _ = _block_scale(tl.max(tl.maximum(low_bits, high_bits), axis=1), k, decode)
        largest = ((s * 6.0) * decode)[:, None]
        keep_low = low_bits.to(tl.float32, bitcast=True) <= largest
        keep_high = high_bits.to(tl.float32, bitcast=True) <= largest
        g_low, g_high = _unpack(tl.load(grad + at, mask=inside, other=0), DTYPE)
        word = _word(g_low * keep_low.to(tl.float32), g_high * keep_high.to(tl.float32), DTYPE)
        tl.store(out + at, word, mask=inside)
