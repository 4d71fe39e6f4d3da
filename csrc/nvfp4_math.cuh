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
QUADS_HD uint32_t bits(float x) { return __float_as_uint(x); }
QUADS_HD float from_bits(uint32_t u) { return __uint_as_float(u); }
#else
QUADS_HD uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
QUADS_HD float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
QUADS_HD float mul_rn(float a, float b) { return a * b; }
QUADS_HD float add_rn(float a, float b) { return a + b; }
QUADS_HD float sub_rn(float a, float b) { return a - b; }
QUADS_HD float div_rn(float a, float b) { return a / b; }
#endif

QUADS_HD float abs_bits(float x) { return from_bits(bits(x) & 0x7FFFFFFFu); }
QUADS_HD bool is_finite(float x) { return (bits(x) & 0x7F800000u) != 0x7F800000u; }

// max(a, b) on magnitudes that keeps NaN (comparing the bit patterns of non-negative floats orders NaN above Inf).
QUADS_HD float max_magnitude(float a, float b) {
  uint32_t x = bits(a), y = bits(b);
  return from_bits(x > y ? x : y);
}

// Encode global scale g = range / amax, capped at FLT_MAX; 1 where amax is 0; NaN stays NaN.
QUADS_HD float encode_scale(float amax, float range) {
  if (amax == 0.0f) return 1.0f;
  float g = div_rn(range, amax);
  return g > kFltMax ? kFltMax : g;
}

// Round to the nearest E2M1 value, ties to even, saturating at 6; sign of zero kept. Adding and subtracting 2^22,
// 2^23 or 2^24 rounds to a multiple of 0.5, 1 or 2, the step of the grid around |y|.
QUADS_HD float e2m1_round(float y) {
  float m = abs_bits(y);
  m = m > 6.0f ? 6.0f : m;
  uint32_t e = bits(m);
  e = e < 0x3F800000u ? 0x3F800000u : e;
  float magic = from_bits((e & 0x7F800000u) + 0x0B000000u);
  float r = sub_rn(add_rn(m, magic), magic);
  return from_bits(bits(r) | (bits(y) & 0x80000000u));
}

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
  float o = div_rn(1.0f, mul_rn(b.s, decode));
  b.o = o > kFltMax ? kFltMax : o;
  return b;
}

QUADS_HD float amax16(const float (&x)[16]) {
  float m = abs_bits(x[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) m = max_magnitude(m, abs_bits(x[i]));
  return m;
}

// sf = m * (g * f32(1/6)); NaN (one pattern) where the block or sf is not finite as the reference has it.
QUADS_HD float scale_factor(float m, float g) {
  float sf = mul_rn(m, mul_rn(g, kOneSixth));
  return (is_finite(m) && !(bits(sf) << 1 > 0xFF000000u)) ? sf : from_bits(0x7FC00000u);
}

// Squared error of a candidate, summed by halves.
QUADS_HD float block_error(const float (&x)[16], const float (&q)[16], float s, float decode) {
  float e[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float r = sub_rn(x[i], mul_rn(mul_rn(q[i], s), decode));
    e[i] = mul_rn(r, r);
  }
#pragma unroll
  for (int half = 8; half >= 1; half >>= 1)
#pragma unroll
    for (int i = 0; i < half; ++i) e[i] = add_rn(e[i], e[i + half]);
  return e[0];
}

// x -> E2M1 values q and block scale. FOUR: choose between mapping the amax to 6 and to 4.
template <bool FOUR>
QUADS_HD BlockScale quantize_block(const float (&x)[16], float g, float decode, float (&q)[16]) {
  float m = amax16(x);
  float sf = scale_factor(m, g);
  BlockScale b = block_scale(sf, decode);
#pragma unroll
  for (int i = 0; i < 16; ++i) q[i] = m == 0.0f ? 0.0f : e2m1_round(mul_rn(x[i], b.o));
  if (FOUR) {
    BlockScale b4 = block_scale(mul_rn(sf, 1.5f), decode);
    float q4[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) q4[i] = m == 0.0f ? 0.0f : e2m1_round(mul_rn(x[i], b4.o));
    if (block_error(x, q4, b4.s, decode) < block_error(x, q, b.s, decode)) {
      b = b4;
#pragma unroll
      for (int i = 0; i < 16; ++i) q[i] = q4[i];
    }
  }
  return b;
}

// r = x - (q s) decode, two roundings; quantized with the same global scale and block scales of its own.
QUADS_HD BlockScale quantize_residual(const float (&x)[16], const float (&q)[16], float s, float g, float decode,
                                      float (&qr)[16]) {
  float r[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = sub_rn(x[i], mul_rn(mul_rn(q[i], s), decode));
  return quantize_block<false>(r, g, decode, qr);
}

}  // namespace quads
