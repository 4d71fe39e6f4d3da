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

// Four A fragment registers before their scales (magnitudes at bits 11..9 and 27..25, signs at 15 and 31) to packed bytes: two codes,
// low nibble = even k.
QUADS_ARRANGE uint32_t gather_four(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#ifdef __CUDA_ARCH__
  const uint32_t p = __byte_perm(a0, a1, 0x7351), q = __byte_perm(a2, a3, 0x7351);
  const uint32_t low = __byte_perm(p, q, 0x5410), high = __byte_perm(p, q, 0x7632);
#else
  const uint32_t a[4] = {a0, a1, a2, a3};
  uint32_t low = 0, high = 0;
  for (int i = 0; i < 4; ++i) low |= (a[i] >> 8 & 0xFFu) << 8 * i, high |= a[i] >> 24 << 8 * i;
#endif
  // magnitudes at bits 3..1 of a byte, the sign at bit 7
  constexpr uint32_t each = 0x01010101u;
  const uint32_t lower = (low >> 1 & 7u * each) | (low >> 4 & 8u * each), upper = (high << 3 & 0x70u * each) | (high & 0x80u * each);
  return lower | upper;
}

// A word w with a0 = (w ^ w >> 3) & M, a1 = (w ^ w << 2) & M, a2 = (w << 6) & M, a3 = (w << 9) & M, M = 0x8E008E00, is linear over
// GF(2) in the codes: a2 and a3 give 16 bits outright, a0 and a1 the others one after the other.
//
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

// Bytes of registers a0..a3 of four words, byte i of each belonging to word i, to the words.
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

// The way back from one half of four words (bits 0..7 and 8..15, word i at byte i): nibbles of registers 0..3 in the low bits of bytes.
QUADS_ARRANGE void decode_halves(uint32_t low, uint32_t high, uint32_t carry, uint32_t (&nibbles)[4]) {
  constexpr uint32_t each = 0x01010101u, magnitude = 7u * each, sign = 8u * each;
  const uint32_t z = high ^ (high << 2 & ~(3u * each));
  nibbles[0] = ((high ^ (high >> 3 & 0x1Fu * each)) >> 1 & magnitude) | ((high >> 4 ^ carry << 1) & sign);
  nibbles[1] = (z >> 1 & 6u * each) | (z >> 4 & sign) | ((high >> 1 ^ low >> 7) & each);
  nibbles[2] = (low >> 3 & magnitude) | (high << 2 & sign);
  nibbles[3] = (low & magnitude) | (low >> 3 & sign);
}

// The inverse of encode_four.
QUADS_ARRANGE void decode_four(const uint32_t (&words)[4], uint32_t (&a)[4]) {
  uint32_t b[4];
#ifdef __CUDA_ARCH__
  const uint32_t p = __byte_perm(words[0], words[1], 0x5140), q = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t r = __byte_perm(words[0], words[1], 0x7362), s = __byte_perm(words[2], words[3], 0x7362);
  b[0] = __byte_perm(p, q, 0x5410);
  b[1] = __byte_perm(p, q, 0x7632);
  b[2] = __byte_perm(r, s, 0x5410);
  b[3] = __byte_perm(r, s, 0x7632);
#else
  for (int j = 0; j < 4; ++j) {
    b[j] = 0;
    for (int i = 0; i < 4; ++i) b[j] |= (words[i] >> 8 * j & 0xFFu) << 8 * i;
  }
#endif
  uint32_t low[4], high[4];
  decode_halves(b[0], b[1], b[2], low);
  decode_halves(b[2], b[3], 0u, high);
  for (int i = 0; i < 4; ++i) a[i] = low[i] | high[i] << 4;
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

// One scale word: rows g and g + 8 of its even k-step, then of its odd one.
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

// e4m3_from_e5m3 of four bytes.
QUADS_ARRANGE uint32_t e4m3_four(uint32_t raw) {
  const uint32_t least = (raw | ((raw & 0x7F7F7F7Fu) + 0x38383838u)) & 0x80808080u, most = raw & raw << 1 & 0x80808080u;
  if (least != 0x80808080u || most != 0) {  // not all of 72 .. 191: rare
    uint32_t out = 0;
    for (int i = 0; i < 32; i += 8) out |= e4m3_from_e5m3(raw >> i & 0xFFu) << i;
    return out;
  }
  return raw - 0x40404040u;
}

// True if one of four block scales is NaN or negative.
QUADS_ARRANGE bool bad_scales(uint32_t codes) { return (((codes & 0x7F7F7F7Fu) + 0x01010101u) | codes) & 0x80808080u; }

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
