// SPDX-License-Identifier: Apache-2.0
// The quant-dequant path of one 16-element block, bit-identical to vllm_quads/nvfp4/reference.py.
//
// Compiles for the device (nvcc) and for the host (any C++17 compiler, -ffp-contract=off), so that the very same
// source is checked against the reference on a machine without a GPU. Every float operation is one IEEE rounding:
// the device side uses the _rn intrinsics, which the compiler never contracts into FMAs.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define QUADS_HD __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define QUADS_HD inline
#endif

namespace quads {

constexpr float kFltMax = 3.402823466e+38f;
constexpr float kOneSixth = 0.1666666716337204f;
constexpr float kRangeMaxToSix = 2688.0f;      // 6 * 448
constexpr float kRangeFourOverSix = 1536.0f;   // 6 * 256

#ifdef __CUDA_ARCH__
QUADS_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
QUADS_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
QUADS_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
QUADS_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
QUADS_HD float rcp_rn(float a) { return __frcp_rn(a); }
QUADS_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
QUADS_HD uint32_t bits(float x) { return __float_as_uint(x); }
QUADS_HD float from_bits(uint32_t u) { return __uint_as_float(u); }
#else
QUADS_HD uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
QUADS_HD float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
QUADS_HD float mul_rn(float a, float b) { return a * b; }
QUADS_HD float add_rn(float a, float b) { return a + b; }
QUADS_HD float sub_rn(float a, float b) { return a - b; }
QUADS_HD float div_rn(float a, float b) { return a / b; }
QUADS_HD float rcp_rn(float a) { return 1.0f / a; }
QUADS_HD float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
#endif

QUADS_HD float magnitude(float x) {
#ifdef __CUDA_ARCH__
  return fabsf(x);
#else
  return from_bits(bits(x) & 0x7FFFFFFFu);
#endif
}
QUADS_HD bool is_finite(float x) { return (bits(x) & 0x7F800000u) != 0x7F800000u; }

// max(|a|, |b|); NaN wins.
QUADS_HD float max_magnitude(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(a)), "f"(fabsf(b)));
  return r;
#else
  uint32_t x = bits(a) & 0x7FFFFFFFu, y = bits(b) & 0x7FFFFFFFu;
  return from_bits(x > y ? x : y);
#endif
}

// Encode global scale g = range / amax, capped at FLT_MAX; 1 where amax is 0; NaN stays NaN.
QUADS_HD float encode_scale(float amax, float range) {
  if (amax == 0.0f) return 1.0f;
  float g = div_rn(range, amax);
  return g > kFltMax ? kFltMax : g;
}

// Rounding to E2M1 (ties to even). The grid has steps of 0.5 below 2, 1 below 4 and 2 above, and a float32 sum near 2^22 m has
// just the step that belongs to m. So with m = max(a, 1.5), which keeps the sum in the binade of 2^22 m, two FMAs round a; where
// a sum falls into the binade below, a is within two ulps of 2 or 4 and goes to 2 or 4 either way. 2^22 m is an even multiple
// of the step at every tie. `tests/test_kernels_math.py` goes through every float.

// 0 <= a < 7 to E2M1. NaN stays NaN.
QUADS_HD float e2m1_round(float a) {
  const float m = a > 1.5f ? a : 1.5f;
  const float rest = fma_rn(m, 4194304.0f, -a);
  return fma_rn(m, 4194304.0f, -rest);
}

// The same for 0 <= a <= 4.5: 2^23 - 2 + a has step 0.5 for a < 2 and step 1 above.
QUADS_HD float e2m1_round_small(float a) { return sub_rn(add_rn(a, 8388606.0f), 8388606.0f); }

// The same for any a >= 0, saturating at 6.
QUADS_HD float e2m1_round_saturating(float a) { return e2m1_round(a > 6.0f ? 6.0f : a); }

// Round |y| < 7, a zero result is +0: the step comes from the exponent of max(|y|, 1), and 1.5 * 2^22 steps are added.
QUADS_HD float e2m1_round_signed(float y) {
  const float m = magnitude(y);
  const float e = from_bits(bits(m > 1.0f ? m : 1.0f) & 0x7F800000u);
  return fma_rn(e, -6291456.0f, fma_rn(e, 6291456.0f, y));
}

// 3-bit code of an E2M1 magnitude: scaled by 2^-126, float32's exponent and first fraction bit are E2M1's, subnormal included.
QUADS_HD uint32_t e2m1_code(float q) { return bits(mul_rn(q, 1.17549435e-38f)) >> 22; }

// Value of a non-negative E4M3 byte.
QUADS_HD float e4m3_value(uint32_t byte) {
#ifdef __CUDA_ARCH__
  __half_raw h = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)byte, __NV_E4M3);
  return __half2float(__half(h));
#else
  uint32_t e = (byte >> 3) & 15u, f = byte & 7u;
  if ((byte & 0x7Fu) == 0x7Fu) return from_bits(0x7FC00000u);
  if (e == 0) return (float)f * 0.001953125f;
  return from_bits(((e + 120u) << 23) | (f << 20));
#endif
}

// E4M3 byte of a non-negative float: ties to even, saturating at 448; NaN gives 0x7F.
QUADS_HD uint32_t e4m3_byte(float x) {
#ifdef __CUDA_ARCH__
  return (uint32_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3) & 0x7Fu;
#else
  uint32_t u = bits(x);
  if (u > 0x7F800000u) return 0x7Fu;
  if (x >= 448.0f) return 0x7Eu;
  if (x < 0.015625f) {  // below 2^-6: multiples of 2^-9; adding 2^14 rounds to one
    float r = sub_rn(add_rn(x, 16384.0f), 16384.0f);
    return (uint32_t)(r * 512.0f);
  }
  u += 0x7FFFFu + ((u >> 20) & 1u);
  return (u >> 20) - (120u << 3);
#endif
}

// 1 / d for 2^-100 < d < 2^100: the steps of the rounded reciprocal without those for the ends of the range.
QUADS_HD float reciprocal(float d) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fma_rn(r, fma_rn(-d, r, 1.0f), r);
#else
  return 1.0f / d;
#endif
}

// What is the same for all blocks of a row: g * f32(1/6), 1 / g, and the smallest sf for which the quick path is taken.
struct RowScale {
  float sixth, decode, least;
};

// Quick path: block scales of 2^-7 to 448, which rounding moves by no more than 1/8, times a decode scale with which neither
// their product, its reciprocal nor a squared error leaves the range of normal numbers.
QUADS_HD RowScale row_scale(float g) {
  RowScale r;
  r.sixth = mul_rn(g, kOneSixth);
  r.least = 3.0e38f;
  if (g >= 9.0949470e-13f && g <= 1.0995116e12f) {  // 2^-40, 2^40
    r.decode = reciprocal(g);
    r.least = 0.0078125f;
  } else {
    r.decode = div_rn(1.0f, g);
  }
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(r.decode), "+f"(r.least));  // or the compiler computes them again wherever they are used
#endif
  return r;
}

// Scale byte, its value s and d = s * decode, the step of a block's grid.
struct BlockScale {
  uint32_t byte;
  float s;
  float d;
};

QUADS_HD BlockScale block_scale(float sf, float decode) {
  BlockScale b;
  b.byte = e4m3_byte(sf);
  b.s = e4m3_value(b.byte);
  b.d = mul_rn(b.s, decode);
  return b;
}

// The scales of two sf > 0 at once.
QUADS_HD void two_block_scales(float sf, float sf2, float decode, BlockScale& a, BlockScale& b) {
#ifdef __CUDA_ARCH__
  const uint32_t pair = __nv_cvt_float2_to_fp8x2(make_float2(sf, sf2), __NV_SATFINITE, __NV_E4M3);
  const float2 s = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3)));
  a.byte = pair & 0xFFu;
  b.byte = pair >> 8;
  a.s = s.x;
  b.s = s.y;
  a.d = mul_rn(a.s, decode);
  b.d = mul_rn(b.s, decode);
#else
  a = block_scale(sf, decode);
  b = block_scale(sf2, decode);
#endif
}

// o = min(1 / d, FLT_MAX), what a block is multiplied with.
QUADS_HD float multiplier(float d) {
  const float o = rcp_rn(d);
  return o > kFltMax ? kFltMax : o;
}

// sqrt(x) to a few units in the last place.
QUADS_HD float square_root(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return std::sqrt(x);
#endif
}

// max |x|; a tree, because a chain of sixteen would be waited for.
QUADS_HD float amax16(const float (&x)[16]) {
  float m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = max_magnitude(x[i], x[i + 8]);
#pragma unroll
  for (int half = 4; half >= 1; half >>= 1)
#pragma unroll
    for (int i = 0; i < half; ++i) m[i] = max_magnitude(m[i], m[i + half]);
  return m[0];
}

// sf = m * (g * f32(1/6)), NaN for a block that is not finite.
QUADS_HD float scale_factor(float m, float sixth) {
  return mul_rn(m <= kFltMax ? m : from_bits(0x7FC00000u), sixth);
}

// Sum of squares by halves.
QUADS_HD float block_error(const float (&r)[16]) {
  float e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) e[i] = add_rn(mul_rn(r[i], r[i]), mul_rn(r[i + 8], r[i + 8]));
#pragma unroll
  for (int half = 4; half >= 1; half >>= 1)
#pragma unroll
    for (int i = 0; i < half; ++i) e[i] = add_rn(e[i], e[i + half]);
  return e[0];
}

// Squared error of magnitudes q at scale s, as the reference has it.
QUADS_HD float squared_error(const float (&x)[16], const float (&q)[16], float s, float decode) {
  float r[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = sub_rn(magnitude(x[i]), mul_rn(mul_rn(q[i], s), decode));
  return block_error(r);
}

// A block with one scale, as the reference has it, for any values: E2M1 magnitudes q and the squared error.
QUADS_HD float encode_block(const float (&x)[16], const BlockScale& b, float decode, float (&q)[16]) {
  const float o = multiplier(b.d);
#pragma unroll
  for (int i = 0; i < 16; ++i) q[i] = e2m1_round_saturating(mul_rn(magnitude(x[i]), o));
  return squared_error(x, q, b.s, decode);
}

// Main quantization of a block with amax m: its scale and the E2M1 magnitudes q; signs are those of x.
// FOUR: choose between mapping m to 6 and to 4, by squared error, 6 at a tie.
//
// The squared errors are d^2 S with S the sum of (|x| o - q)^2, which takes two operations an element. With u = 2^-24 the
// reference's residuals differ from d (|x| o - q) by less than 29 u d (|x| o and q are below 7, each operation rounds
// once), hence its error from d^2 S by less than 232 u d^2 sqrt(S) + 20 u d^2 S; for both together, with the larger d, that is
// 328 u d^2 sqrt(S6 + S4) + 20 u d^2 (S6 + S4). Only where the errors are nearer to each other than this are they computed
// as the reference does.
template <bool FOUR>
QUADS_HD BlockScale quantize_block(const float (&x)[16], float m, const RowScale& row, float (&q)[16]) {
  BlockScale six, four;
  const float sf = mul_rn(m, row.sixth);  // NaN and Inf fail the test
  if (sf >= row.least && sf <= (FOUR ? 298.0f : 460.0f)) {
    if (!FOUR) {
      six = block_scale(sf, row.decode);
      const float o = reciprocal(six.d);
#pragma unroll
      for (int i = 0; i < 16; ++i) q[i] = e2m1_round(mul_rn(magnitude(x[i]), o));
      return six;
    }
    two_block_scales(sf, mul_rn(sf, 1.5f), row.decode, six, four);
    const float o6 = reciprocal(six.d), o4 = reciprocal(four.d);
    float q4[16], s6[2] = {0.0f, 0.0f}, s4[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float a = mul_rn(magnitude(x[i]), o6), b = mul_rn(magnitude(x[i]), o4);
      q[i] = e2m1_round(a);
      q4[i] = e2m1_round_small(b);
      const float da = sub_rn(a, q[i]), db = sub_rn(b, q4[i]);
      s6[i & 1] = fma_rn(da, da, s6[i & 1]);
      s4[i & 1] = fma_rn(db, db, s4[i & 1]);
    }
    // in units of decode, which both have
    const float sum6 = add_rn(s6[0], s6[1]), sum4 = add_rn(s4[0], s4[1]);
    const float w6 = mul_rn(six.s, six.s), w4 = mul_rn(four.s, four.s);
    float gain = fma_rn(w4, sum4, -mul_rn(w6, sum6));  // rounding: below u (e6 + e4)
    const float sums = add_rn(sum6, sum4);
    if (!(magnitude(gain) > mul_rn(w4, fma_rn(sums, 1.5e-6f, mul_rn(square_root(sums), 2.0e-5f))))) {
      float apart = 1.0f;
      if (four.s == mul_rn(six.s, 1.5f)) {
        // Often the same values are on both grids, as where one element dominates the block: a tie then.
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 16; ++i) part[i & 1] = add_rn(part[i & 1], magnitude(fma_rn(q4[i], -1.5f, q[i])));
        apart = add_rn(part[0], part[1]);
      }
      gain = 0.0f;
      if (apart != 0.0f) gain = sub_rn(squared_error(x, q4, four.s, row.decode), squared_error(x, q, six.s, row.decode));
    }
    const bool take_four = gain < 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = take_four ? q4[i] : q[i];
    six.byte = take_four ? four.byte : six.byte;
    six.s = take_four ? four.s : six.s;
    six.d = take_four ? four.d : six.d;
    return six;
  }
  const float any = scale_factor(m, row.sixth);
  six = block_scale(any, row.decode);
  const float e6 = encode_block(x, six, row.decode, q);
  if (FOUR) {
    four = block_scale(mul_rn(any, 1.5f), row.decode);
    float q4[16];
    const float e4 = encode_block(x, four, row.decode, q4);
    const bool take_four = e4 < e6;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = take_four ? q4[i] : q[i];
    if (take_four) six = four;
  }
  return six;
}

// What the first quantization left of |x|: p = q s (exact) and r = |x| - p * decode (two roundings).
QUADS_HD void residual_block(const float (&x)[16], const float (&q)[16], float s, float decode, float (&p)[16], float (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    p[i] = mul_rn(q[i], s);
    r[i] = sub_rn(magnitude(x[i]), mul_rn(p[i], decode));
  }
}

// Second quantization, with the same global scale and a block scale of its own: E2M1 values qr, +0 where they are zero.
QUADS_HD BlockScale quantize_residual(const float (&r)[16], const RowScale& row, float (&qr)[16]) {
  const float m = amax16(r);
  const float sf = mul_rn(m, row.sixth);
  if (sf >= row.least && sf <= 460.0f) {
    const BlockScale b = block_scale(sf, row.decode);
    const float o = reciprocal(b.d);
#pragma unroll
    for (int i = 0; i < 16; ++i) qr[i] = e2m1_round_signed(mul_rn(r[i], o));
    return b;
  }
  const BlockScale b = block_scale(scale_factor(m, row.sixth), row.decode);
  const float o = multiplier(b.d);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float y = mul_rn(r[i], o);
    qr[i] = e2m1_round_signed(y > 6.0f ? 6.0f : y < -6.0f ? -6.0f : y);
  }
  return b;
}

// 4-bit codes of a block: magnitudes q with the signs of x, zero for a block of zeros or NaN.
QUADS_HD void block_codes(const float (&q)[16], const float (&x)[16], bool empty, uint32_t (&words)[2]) {
  words[0] = words[1] = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 8] |= (e2m1_code(q[i]) | ((bits(x[i]) >> 28) & 8u)) << (4 * (i % 8));
  if (empty) words[0] = words[1] = 0;
}

// The same of a residual: r is that of |x|, and where it is exactly zero the code is 0 and not a negative zero.
QUADS_HD void residual_codes(const float (&qr)[16], const float (&r)[16], const float (&x)[16], bool empty, uint32_t (&words)[2]) {
  float q[16], sign[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    q[i] = magnitude(qr[i]);
    sign[i] = r[i] == 0.0f ? 0.0f : from_bits(bits(r[i]) ^ (bits(x[i]) & 0x80000000u));
  }
  block_codes(q, sign, empty, words);
}

}  // namespace quads
