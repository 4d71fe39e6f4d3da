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

// One half (16 bits) of four words at once: the byte i of a0..a3 has a nibble of register 0..3 of word i in its low bits (what is in
// the high bits does not count); byte i of `low` and `high` are bits 0..7 and 8..15 of that half. `carry`: bit 2 of its bytes is what
// crosses into bit 15 from the upper half (register 3's), 0 where there is none. Bits of a half, of codes m0 m1 m2 s:
//   0..2 a3.m   3..5 a2.m   6 a3.s   7 a1.m0 ^ a2.s   9 a2.s   11 a1.m2 ^ a2.s   12 a0.m0 ^ a2.s   14 a0.m2 ^ a1.m2 ^ a2.s
//   15 a0.s ^ carry   13 a1.s ^ bit 15   10 a0.m1 ^ bit 13   8 a1.m1 ^ bit 10
QUADS_ARRANGE void encode_halves(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t carry, uint32_t& low, uint32_t& high) {
  constexpr uint32_t each = 0x01010101u;
  const uint32_t middle = (a3 & 7u * each) | (a2 << 3 & ~(7u * each));                   // 0..5
  const uint32_t most = (middle & 0x3Fu * each) | (a3 << 3 & ~(0x3Fu * each));           // 6
  low = (most & 0x7Fu * each) | ((a1 << 7 ^ a2 << 4) & 0x80u * each);                    // 7
  const uint32_t v = a1 << 4;
  const uint32_t from = (carry << 5 & 0x80u * each) | (v & ~(0x80u * each));             // 14 and 15
  const uint32_t top = a0 << 4 ^ (from & 0xC0u * each);                                  // 12, 14, 15
  const uint32_t signs = (a2 >> 2 & 2u * each) * 45u;                                    // a2.s at 9, 11, 12, 14
  const uint32_t chain = ((top ^ v) >> 7 & each) * 37u;                                  // bit 13, at 8, 10, 13
  const uint32_t left = (a0 << 1 & 4u * each) | (a1 << 1 & ~(4u * each));                // 10 and 11
  const uint32_t right = (a0 ^ a1) >> 1;                                                 // 8
  high = (top & 0xD0u * each) ^ signs ^ chain ^ (left & 0x0Cu * each) ^ (right & each);
}

// Bytes of registers a0..a3 of four words, byte i of each belonging to word i, to the words: encode_word of spread bytes.
QUADS_ARRANGE void encode_four(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t (&words)[4]) {
  uint32_t b[4];
  const uint32_t h0 = a0 >> 4, h1 = a1 >> 4, h2 = a2 >> 4, h3 = a3 >> 4;
  encode_halves(a0, a1, a2, a3, h3, b[0], b[1]);
  encode_halves(h0, h1, h2, h3, 0u, b[2], b[3]);
#ifdef __CUDA_ARCH__
  const uint32_t p = __byte_perm(b[0], b[1], 0x5140), q = __byte_perm(b[2], b[3], 0x5140);
  const uint32_t r = __byte_perm(b[0], b[1], 0x7362), s = __byte_perm(b[2], b[3], 0x7362);
  words[0] = __byte_perm(p, q, 0x5410);
  words[1] = __byte_perm(p, q, 0x7632);
  words[2] = __byte_perm(r, s, 0x5410);
  words[3] = __byte_perm(r, s, 0x7632);
#else
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
    for (int j = 0; j < 4; ++j) words[i] |= (b[j] >> 8 * i & 0xFFu) << 8 * j;
  }
#endif
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

// e5m3_from_e4m3 of four bytes.
QUADS_ARRANGE uint32_t e5m3_four(uint32_t codes) {
  const uint32_t c = codes & 0x7F7F7F7Fu, exponent = c & 0x78787878u;
  // A byte without exponent (the borrow may report its neighbour as well), or NaN: rare.
  if ((((exponent - 0x01010101u) & ~exponent) | (c + 0x01010101u)) & 0x80808080u) {
    uint32_t out = 0;
    for (int i = 0; i < 32; i += 8) out |= e5m3_from_e4m3(c >> i & 0xFFu) << i;
    return out;
  }
  return c + 0x40404040u;
}

// True if one of four block scales is NaN or negative.
QUADS_ARRANGE bool bad_scales(uint32_t codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u | codes) & 0x80808080u; }

// Both scale words of a K block, from the E5M3 bytes of k-steps 0..3 of rows g and g + 8.
QUADS_ARRANGE void encode_scales_of_block(uint32_t low, uint32_t high, uint32_t (&words)[2]) {
  for (int i = 0; i < 2; ++i) {
#ifdef __CUDA_ARCH__
    const uint32_t even = __byte_perm(low, high, i ? 0x7632 : 0x5410) & 0x00FF00FFu;
    const uint32_t odd = __byte_perm(low, high, i ? 0x7632 : 0x5410) >> 8 & 0x00FF00FFu;
#else
    const uint32_t pair = (low >> 16 * i & 0xFFFFu) | (high >> 16 * i & 0xFFFFu) << 16;
    const uint32_t even = pair & 0x00FF00FFu, odd = pair >> 8 & 0x00FF00FFu;
#endif
    words[i] = even << 7 | (odd >> 1 | odd << 31);
  }
}

}  // namespace quads
