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

// o = min(1 / d, FLT_MAX), what a block is multiplied with.
QUADS_HD float multiplier(float d) {
  const float o = rcp_rn(d);
  return o > kFltMax ? kFltMax : o;
}

// 1 / d for kSmallest <= d <= kLargest: the steps of the rounded reciprocal without those for the ends of the range.
constexpr float kSmallest = 8.8817842e-16f, kLargest = 1.1258999e15f;  // 2^-50, 2^50
QUADS_HD float reciprocal(float d) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fma_rn(r, fma_rn(-d, r, 1.0f), r);
#else
  return 1.0f / d;
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

// sf = m * (g * f32(1/6)), NaN for a block that is not finite; sixth = g * f32(1/6).
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

// A block with one scale, as the reference has it, for any values: E2M1 magnitudes q and the squared error.
QUADS_HD float encode_block(const float (&x)[16], const BlockScale& b, float decode, float (&q)[16]) {
  const float o = multiplier(b.d);
  float r[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    q[i] = e2m1_round_saturating(mul_rn(magnitude(x[i]), o));
    r[i] = sub_rn(magnitude(x[i]), mul_rn(mul_rn(q[i], b.s), decode));
  }
  return block_error(r);
}

// Margin of the quick choice between the two scales, see `quantize_block`.
constexpr float kMargin = 1.52587890625e-05f;  // 2^-16

// Main quantization of a block with amax m: its scale and the E2M1 magnitudes q; signs are those of x.
// FOUR: choose between mapping m to 6 and to 4, by squared error, 6 at a tie.
//
// The squared errors are d^2 S with S the sum of (|x| o - q)^2, which takes two operations an element. With u = 2^-24 the reference's
// residuals differ from d (|x| o - q) by less than 29 u d (|x| o and q are below 7, each operation rounds once), hence
// its error from d^2 S by less than 232 u d^2 sqrt(S) + 20 u d^2 S, hence by less than 2^-16 d^2 (1 + S). Only where the two
// are nearer to each other than the sum of these bounds, and for scales so small or large that float32 could lose bits,
// are both errors computed as the reference does.
template <bool FOUR>
QUADS_HD BlockScale quantize_block(const float (&x)[16], float m, float sixth, float decode, float (&q)[16]) {
  const float sf = scale_factor(m, sixth);
  const BlockScale six = block_scale(sf, decode);
  if (!FOUR) {
    const float o = reciprocal(six.d);
    if (six.d >= kSmallest && six.d <= kLargest && mul_rn(m, o) < 7.0f) {
#pragma unroll
      for (int i = 0; i < 16; ++i) q[i] = e2m1_round(mul_rn(magnitude(x[i]), o));
    } else {
      const float any = multiplier(six.d);
#pragma unroll
      for (int i = 0; i < 16; ++i) q[i] = e2m1_round_saturating(mul_rn(magnitude(x[i]), any));
    }
    return six;
  }
  const BlockScale four = block_scale(mul_rn(sf, 1.5f), decode);
  const float o6 = reciprocal(six.d), o4 = reciprocal(four.d);
  bool settled = false, take_four = false;
  if (six.d >= kSmallest && four.d <= kLargest && mul_rn(m, o6) < 7.0f && mul_rn(m, o4) <= 4.5f) {
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
    const float w6 = six.s * six.s, w4 = four.s * four.s;  // decode^2 is common to both
    const float e6 = w6 * (s6[0] + s6[1]), e4 = w4 * (s4[0] + s4[1]);
    settled = magnitude(e6 - e4) > kMargin * ((w6 + e6) + (w4 + e4));
    take_four = e4 < e6;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = take_four ? q4[i] : q[i];
  }
  if (!settled) {
    float q4[16];
    const float e6 = encode_block(x, six, decode, q), e4 = encode_block(x, four, decode, q4);
    take_four = e4 < e6;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = take_four ? q4[i] : q[i];
  }
  return take_four ? four : six;
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
QUADS_HD BlockScale quantize_residual(const float (&r)[16], float sixth, float decode, float (&qr)[16]) {
  const float m = amax16(r);
  const BlockScale b = block_scale(scale_factor(m, sixth), decode);
  const float o = reciprocal(b.d);
  if (b.d >= kSmallest && b.d <= kLargest && mul_rn(m, o) < 7.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) qr[i] = e2m1_round_signed(mul_rn(r[i], o));
  } else {
    const float any = multiplier(b.d);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float y = mul_rn(r[i], any);
      qr[i] = e2m1_round_signed(y > 6.0f ? 6.0f : y < -6.0f ? -6.0f : y);
    }
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
