// SPDX-License-Identifier: Apache-2.0
// Between a checkpoint's bytes and the words of the prepared layout (weights.cuh). Compiles for the device and for the host, so
// that the bit operations are checked against vllm_quads/kernels/layout.py without a GPU.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define QUADS_ARRANGE __host__ __device__ __forceinline__
#else
#define QUADS_ARRANGE inline
#endif

namespace quads {

// A packed byte (two codes, low nibble = even k) as an A fragment register before its scale: magnitudes at bits 11..9 and
// 27..25, signs at 15 and 31.
QUADS_ARRANGE uint32_t spread_byte(uint32_t c) {
  return (c & 0x07u) << 9 | (c & 0x08u) << 12 | (c & 0x70u) << 21 | (c & 0x80u) << 24;
}

QUADS_ARRANGE uint32_t gather_byte(uint32_t a) {
  return (a >> 9 & 0x07u) | (a >> 12 & 0x08u) | (a >> 21 & 0x70u) | (a >> 24 & 0x80u);
}

// The word w with a0 = (w ^ w >> 3) & M, a1 = (w ^ w << 2) & M, a2 = (w << 6) & M, a3 = (w << 9) & M, M = 0x8E008E00: a2 and a3
// give 16 bits outright, a0 and a1 the others one after the other.
QUADS_ARRANGE uint32_t encode_word(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
  constexpr uint32_t b9 = 0x02000200u, b10 = 0x04000400u, b11 = 0x08000800u, b15 = 0x80008000u;
  uint32_t w = a2 >> 6 | a3 >> 9;              // bits 0..6 and 9 of each half
  const uint32_t top = (a0 ^ w >> 3) & b15;    // 15 (of the upper half: bit 34 is 0)
  const uint32_t nine = (a1 ^ w) & b9;
  w |= top | nine >> 2;                        // 7
  w |= ((a0 ^ w) & b9) << 3;                   // 12
  w |= ((a1 ^ w) & b15) >> 2;                  // 13
  w |= (a0 ^ w >> 3) & b10;                    // 10
  w |= ((a1 ^ w) & b10) >> 2;                  // 8
  w |= (a1 ^ w << 2) & b11;                    // 11
  w |= ((a0 ^ w) & b11) << 3;                  // 14
  return w;
}

QUADS_ARRANGE void decode_bits(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t M = 0x8E008E00u;
  a[0] = (w ^ w >> 3) & M;
  a[1] = (w ^ w << 2) & M;
  a[2] = w << 6 & M;
  a[3] = w << 9 & M;
}

constexpr uint32_t kNanE5M3 = 0xFFu;

// E4M3 without its sign to the upper 8 bits of the same value in FP16 without its sign, NaN to NaN; and back.
QUADS_ARRANGE uint32_t e5m3_from_e4m3(uint32_t code) {
  code &= 0x7Fu;
  if (code == 0x7Fu) return kNanE5M3;
  if (code >= 8u) return code + 64u;
  // subnormal m * 2^-9: 0, 1 | 2, 3 | 4 .. 7 have exponents 6, 7, 8 in FP16
  return code == 0u ? 0u : code == 1u ? 48u : code < 4u ? 48u + 4u * code : 56u + 2u * (code - 4u) + 8u;
}
QUADS_ARRANGE uint32_t e4m3_from_e5m3(uint32_t raw) {
  if (raw == kNanE5M3) return 0x7Fu;
  if (raw >= 72u) return raw - 64u;
  return raw == 0u ? 0u : raw == 48u ? 1u : raw < 64u ? (raw - 48u) / 4u : 4u + (raw - 64u) / 2u;
}

// Scales of k-steps (even, odd) of rows g and g + 8 as one word, and back.
QUADS_ARRANGE uint32_t encode_scales(uint32_t even_low, uint32_t even_high, uint32_t odd_low, uint32_t odd_high) {
  return even_low << 7 | even_high << 23 | odd_low >> 1 | (odd_low & 1u) << 31 | odd_high >> 1 << 16 | (odd_high & 1u) << 15;
}
QUADS_ARRANGE void decode_scale_word(uint32_t w, uint32_t (&s)[4]) {
  s[0] = w >> 7 & 0xFFu;
  s[1] = w >> 23 & 0xFFu;
  s[2] = (w & 0x7Fu) << 1 | w >> 31;
  s[3] = (w >> 16 & 0x7Fu) << 1 | (w >> 15 & 1u);
}

}  // namespace quads
