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

// (word + offset) * kMix, xored with itself shifted right by 31 as a signed number.
struct alignas(8) Mixed {
  uint32_t low, high;
};
constexpr uint64_t kMixedZero = kMixOffset * kMix;
QUADS_DIGEST Mixed mixed(int32_t word, uint64_t zero = kMixedZero) {
  static_assert((kMix & 0x80000000u) == 0, "the lower half is multiplied as a signed number");
  const uint64_t p = (uint64_t)((int64_t)word * (int32_t)(uint32_t)kMix) + zero;
  const uint32_t low = (uint32_t)p, high = (uint32_t)(p >> 32) + (uint32_t)word * (uint32_t)(kMix >> 32);
  return {low ^ (high << 1 | low >> 31), high ^ (uint32_t)((int32_t)high >> 31)};
}

// A sum of products, modulo 2^64; what concerns the upper half alone is added there once.
struct DigestSum {
  uint64_t low = 0;
  uint32_t high = 0;
  QUADS_DIGEST void add(Mixed x, uint64_t weight) {
    const uint32_t w = (uint32_t)weight;
    const uint32_t above = (uint32_t)(weight >> 32);
#ifdef __CUDA_ARCH__
    // Three instructions on the pipe that is not busy; the compiler would add zeros and make a tree of the sums.
    asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(low) : "r"(x.low), "r"(w));
    asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(high) : "r"(x.high), "r"(w));
    asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(high) : "r"(x.low), "r"(above));
#else
    low += (uint64_t)x.low * w;
    high += x.high * w + x.low * above;
#endif
  }
  QUADS_DIGEST uint64_t value() const { return low + ((uint64_t)high << 32); }
};

// The global scale's part of a matrix' digest.
QUADS_DIGEST uint64_t digest_of_scalar(uint32_t bits) {
  DigestSum sum;
  const uint64_t w = position_weight(0);
  sum.add(mixed((int32_t)bits), w * w);
  return sum.value();
}

constexpr uint64_t kCodesFactor = 15, kScalesFactor = 5;  // (3 codes + scales) * 5 + global scale

}  // namespace quads
