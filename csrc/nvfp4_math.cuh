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

// Round |y| <= 7 to the nearest E2M1 value, ties to even. Adding and subtracting 1.5 * 2^22, 2^23 or 2^24 rounds to a multiple of
// 0.5, 1 or 2, the step of the grid around y. A zero result is +0. NaN stays NaN.
QUADS_HD float e2m1_round(float y) {
  const float m = from_bits(bits(y) & 0x7FFFFFFFu);
  const float e = from_bits(bits(m > 1.0f ? m : 1.0f) & 0x7F800000u);
  const float magic = mul_rn(e, 6291456.0f);
  return sub_rn(add_rn(y, magic), magic);
}

// The same for any y but NaN, saturating at 6.
QUADS_HD float e2m1_round_saturating(float y) { return e2m1_round(y > 6.0f ? 6.0f : y < -6.0f ? -6.0f : y); }

// 4-bit code (sign << 3 | magnitude) of a value on the E2M1 grid.
QUADS_HD uint32_t e2m1_code(float v) {
  uint32_t u = bits(v);
  uint32_t mag = u & 0x7FFFFFFFu;
  uint32_t code = mag >= 0x3F800000u ? (mag >> 22) - 252u : (mag != 0u ? 1u : 0u);
  if (mag > 0x7F800000u) return 0u;  // NaN: the NaN block scale carries it
  return code | ((u >> 28) & 8u);
}

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

// Scale byte, its value s and the multiplier o = min(1 / (s * decode), FLT_MAX).
struct BlockScale {
  uint32_t byte;
  float s;
  float o;
};

QUADS_HD BlockScale block_scale(float sf, float decode) {
  BlockScale b;
  b.byte = e4m3_byte(sf);
  b.s = e4m3_value(b.byte);
  const float o = rcp_rn(mul_rn(b.s, decode));
  b.o = o > kFltMax ? kFltMax : o;
  return b;
}

QUADS_HD float amax16(const float (&x)[16]) {
  float m = max_magnitude(x[0], x[1]);
#pragma unroll
  for (int i = 2; i < 16; ++i) m = max_magnitude(m, x[i]);
  return m;
}

// sf = m * (g * f32(1/6)); NaN (one pattern) where the block or sf is not finite as the reference has it.
QUADS_HD float scale_factor(float m, float g) {
  float sf = mul_rn(m, mul_rn(g, kOneSixth));
  return (is_finite(m) && !(bits(sf) << 1 > 0xFF000000u)) ? sf : from_bits(0x7FC00000u);
}

// q = e2m1(x * o) of a block with amax m. Saturation is a rare case: only where the block scale itself was rounded far down.
QUADS_HD void round_block(const float (&x)[16], float m, float o, float (&q)[16]) {
  if (mul_rn(m, o) >= 7.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = e2m1_round_saturating(mul_rn(x[i], o));
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = e2m1_round(mul_rn(x[i], o));
  }
}

// A quantized block: p = q s (exact) and the residual r = x - p * decode (two roundings).
struct Block {
  BlockScale scale;
  float p[16];
  float r[16];
};

QUADS_HD void encode_block(const float (&x)[16], float m, float sf, float decode, Block& b) {
  b.scale = block_scale(sf, decode);
  round_block(x, m, b.scale.o, b.p);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    b.p[i] = mul_rn(b.p[i], b.scale.s);
    b.r[i] = sub_rn(x[i], mul_rn(b.p[i], decode));
  }
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

// Main quantization. FOUR: choose between mapping the amax to 6 and to 4, by squared error, 6 at a tie.
template <bool FOUR>
QUADS_HD void quantize_block(const float (&x)[16], float g, float decode, Block& b) {
  const float m = amax16(x);
  const float sf = scale_factor(m, g);
  encode_block(x, m, sf, decode, b);
  if (FOUR) {
    Block four;
    encode_block(x, m, mul_rn(sf, 1.5f), decode, four);
    if (block_error(four.r) < block_error(b.r)) b = four;
  }
}

// Second quantization of the residual, with the same global scale and block scales of its own: E2M1 values qr.
QUADS_HD BlockScale quantize_residual(const Block& b, float g, float decode, float (&qr)[16]) {
  const float m = amax16(b.r);
  const BlockScale s = block_scale(scale_factor(m, g), decode);
  round_block(b.r, m, s.o, qr);
  return s;
}

// The codes of a residual carry no negative zero: where x is -0, so is p in the reference, and r is +0. Here p lost the sign.
QUADS_HD void drop_negative_zeros(float (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = add_rn(r[i], 0.0f);
}

// 4-bit codes of a block as the packed form has them: x * o once more, with the sign of zero that rounding keeps.
QUADS_HD void block_codes(const float (&x)[16], float o, uint32_t (&words)[2]) {
  const float m = amax16(x);
  float q[16];
  round_block(x, m, o, q);
  words[0] = words[1] = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float sign = from_bits(bits(q[i]) | (bits(mul_rn(x[i], o)) & 0x80000000u));
    words[i / 8] |= (m == 0.0f ? 0u : e2m1_code(sign)) << (4 * (i % 8));
  }
}

}  // namespace quads
