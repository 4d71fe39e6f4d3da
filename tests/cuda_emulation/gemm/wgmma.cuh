// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/wgmma.cuh: descriptors are addresses, products are summed in FP32 at once.
#pragma once

#include "mma.cuh"

namespace quads {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N>
inline void wgmma_wait() {}
template <int N>
inline void fewer_registers() {}
template <int N>
inline void more_registers() {}

inline uint64_t wgmma_descriptor(uint32_t address, int kstep) {
  if (address % 1024) emulation::give_up("tile not aligned", address);
  return address + 32 * kstep;
}

template <int N>
inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t descriptor) {
  static uint32_t registers[8][128][6];
  static emulation::Barrier barriers[8];
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  std::memcpy(registers[group][thread], a, 16);
  emulation::meet(barriers[group], 128, 100 + group);
  float rows[2][16];
  for (int i = 0; i < 2; ++i) fragment_row(&registers[group][32 * warp + lane / 4 * 4], i, i + 2, rows[i]);
  const uint32_t tile = descriptor & ~1023u, first = (descriptor & 1023u) / 16;
  for (int j = 0; j < N / 8; ++j)
    for (int c = 0; c < 2; ++c) {
      const int n = lane % 4 * 2 + c;  // of eight tokens; 16-byte chunks are swizzled by it
      float sum[2] = {0.0f, 0.0f};
      for (int chunk = 0; chunk < 2; ++chunk) {
        __half v[8];
        std::memcpy(v, emulation::shared + tile + j * 1024 + n * 128 + ((first + chunk) ^ n) * 16, 16);
        for (int k = 0; k < 8; ++k)
          for (int i = 0; i < 2; ++i) sum[i] += rows[i][8 * chunk + k] * __half2float(v[k]);
      }
      for (int i = 0; i < 2; ++i) d[4 * j + 2 * i + c] += sum[i];
    }
  emulation::meet(barriers[group], 128, 100 + group);
}

}  // namespace quads
