// SPDX-License-Identifier: Apache-2.0
// Digests of vllm_quads/nvfp4/fingerprint.py: the sum of mix(word) * weight(row) * weight(column), modulo 2^64.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define QUADS_DIGEST __host__ __device__ __forceinline__
#else
#define QUADS_DIGEST inline
#endif

namespace quads {

constexpr uint64_t kMix = 0x9E3779B97F4A7C15ull, kFinal = 0xBF58476D1CE4E5B9ull, kMixOffset = 0x5BD1E995ull;

// Odd weight of a row or column.
QUADS_DIGEST uint64_t position_weight(int64_t position) {
  const uint64_t i = (uint64_t)(position + 1) * kMix;
  return ((i ^ (uint64_t)((int64_t)i >> 27)) * kFinal) | 1;
}

// Words as they are mixed: `low` and `high` of (word + offset) * kMix, xored with itself shifted right by 31, as a signed number.
struct Mixed {
  uint32_t low, high;
};
QUADS_DIGEST Mixed mixed(uint32_t unsigned_word, uint64_t offset) {
  const uint64_t p = (uint64_t)unsigned_word * (uint32_t)kMix + offset;
  const uint32_t low = (uint32_t)p, high = (uint32_t)(p >> 32) + unsigned_word * (uint32_t)(kMix >> 32);
  return {low ^ (high << 1 | low >> 31), high ^ (uint32_t)((int32_t)high >> 31)};
}
// Of a signed 32-bit word, which is its unsigned form with the sign bit flipped, less 2^31.
QUADS_DIGEST Mixed mixed_word(uint32_t word) { return mixed(word ^ 0x80000000u, (kMixOffset - 0x80000000ull) * kMix); }
QUADS_DIGEST Mixed mixed_byte(uint32_t byte) { return mixed(byte, kMixOffset * kMix); }

// A sum of products, modulo 2^64; what concerns the upper half alone is added there once.
struct DigestSum {
  uint64_t low = 0;
  uint32_t high = 0;
  QUADS_DIGEST void add(Mixed x, uint64_t weight) {
    const uint32_t w = (uint32_t)weight;
    low += (uint64_t)x.low * w;
    high += x.high * w;
    high += x.low * (uint32_t)(weight >> 32);
  }
  QUADS_DIGEST uint64_t value() const { return low + ((uint64_t)high << 32); }
};

// The global scale's part of a matrix' digest.
QUADS_DIGEST uint64_t digest_of_scalar(uint32_t bits) {
  DigestSum sum;
  const uint64_t w = position_weight(0);
  sum.add(mixed_word(bits), w * w);
  return sum.value();
}

constexpr uint64_t kCodesFactor = 15, kScalesFactor = 5;  // (3 codes + scales) * 5 + global scale

}  // namespace quads
