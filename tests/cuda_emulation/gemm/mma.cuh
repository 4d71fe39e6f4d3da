// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/mma.cuh: fragments are exchanged through memory, products summed in FP32.
#pragma once

#include "common.cuh"

namespace quads {

// The numbers k = 0 .. 15 of a row (or column) whose registers a quad of lanes holds.
inline void fragment_row(const uint32_t (*quad)[6], int low, int high, float (&row)[16]) {
  for (int lane = 0; lane < 4; ++lane)
    for (int half = 0; half < 2; ++half) {
      __half2 v;
      std::memcpy(&v, &quad[lane][half ? high : low], 4);
      row[8 * half + 2 * lane] = __low2float(v);
      row[8 * half + 2 * lane + 1] = __high2float(v);
    }
}

inline void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  static uint32_t addresses[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  addresses[warp][lane] = address;
  __syncwarp();
  for (int m = 0; m < 4; ++m) std::memcpy(&r[m], emulation::shared + addresses[warp][8 * m + lane / 4] + lane % 4 * 4, 4);
  __syncwarp();
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static uint32_t registers[32][32][6];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t(&mine)[6] = registers[warp][lane];
  std::memcpy(mine, a, 16);
  mine[4] = b0;
  mine[5] = b1;
  __syncwarp();
  float rows[2][16], columns[2][16];
  for (int i = 0; i < 2; ++i) {
    fragment_row(&registers[warp][lane / 4 * 4], i, i + 2, rows[i]);
    fragment_row(&registers[warp][(lane % 4 * 2 + i) * 4], 4, 5, columns[i]);
  }
  for (int i = 0; i < 4; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] += sum;
  }
  __syncwarp();
}

}  // namespace quads
