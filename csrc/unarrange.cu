// SPDX-License-Identifier: Apache-2.0
// The prepared layout (weights.cuh) back to the packed form of a checkpoint: the inverse of install.cu, with its division of work.
#include "arrange_math.cuh"
#include "common.cuh"
#include "transpose.cuh"
#include "weights.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct UnarrangeArgs {
  uint8_t* codes;         // [E, rows, k / 2]
  uint8_t* scales;        // [E, rows, k / 16] E4M3
  const uint8_t* blocks;  // [E, row_tiles * kblocks, 2304]
  int experts, rows, k;
  int row_tiles, kblocks;
  int gate_up;            // 1: rows are I of gate, then I of up
};

namespace {

constexpr int kThreads = 128;
constexpr int kBricks = 4;  // of a thread block: a row tile

__global__ void __launch_bounds__(kThreads, 7) unarrange_kernel(const UnarrangeArgs p) {
  grid_dependency_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const ByteTranspose transposed(t);
  const int expert = blockIdx.x / p.row_tiles, tile = blockIdx.x % p.row_tiles, total_steps = p.k / 16, quads = p.kblocks / 4;
  const int group = tile / kGroupTiles * kGroupTiles, tiles = min(kGroupTiles, p.row_tiles - group);
  const uint8_t* const blocks = p.blocks + (((int64_t)expert * p.row_tiles + group) * p.kblocks + tile - group) * kBlockBytes;
  for (int unit = warp; unit < kBricks * quads; unit += kThreads / 32) {
    const int brick = unit / quads, kb = unit % quads * 4;
    int rows[2];  // rows g and g + 8; beyond the last one for padding
    if (p.gate_up) {
      rows[0] = channel_of<kSwiGlu>(tile, brick, g);
      rows[1] = rows[0] + p.rows / 2;
      if (rows[0] >= p.rows / 2) rows[0] = p.rows;
    } else {
      rows[0] = channel_of<kPlain>(tile, brick, g);
      rows[1] = rows[0] + 1;
    }
    uint4 raw[4];  // K blocks kb + j, k-steps 0..3
#pragma unroll
    for (int j = 0; j < 4; ++j)
      raw[j] = __ldcs(reinterpret_cast<const uint4*>(blocks + (int64_t)(kb + j) * tiles * kBlockBytes + brick * 512) + lane);
    const uint2 raw_scales = __ldcs(reinterpret_cast<const uint2*>(
        blocks + (int64_t)(kb + t) * tiles * kBlockBytes + kScaleOffset + brick * 64 + g * 8));
    uint32_t a[4][4];  // k-step t of K block kb + j: bits 0..31 of rows g and g + 8, then bits 32..63
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
      decode_four(words, a[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[j][i] = transposed(a[j][i]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int step = (kb + j) * 4 + t;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (rows[r] < p.rows && step < total_steps)
          *reinterpret_cast<uint2*>(p.codes + ((int64_t)expert * p.rows + rows[r]) * (p.k / 2) + step * 8) = make_uint2(a[j][r], a[j][2 + r]);
    }
    uint32_t even[4], odd[4];
    decode_scale_word(raw_scales.x, even);
    decode_scale_word(raw_scales.y, odd);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t scales = e4m3_four(even[r] | even[2 + r] << 8 | odd[r] << 16 | odd[2 + r] << 24);
      const int step = (kb + t) * 4;
      const int steps = rows[r] < p.rows ? total_steps - step : 0;
      uint8_t* const at = p.scales + ((int64_t)expert * p.rows + rows[r]) * total_steps + step;
      if (p.k % 64 == 0) {
        if (steps > 0) *reinterpret_cast<uint32_t*>(at) = scales;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i < steps) at[i] = (uint8_t)(scales >> 8 * i);
      }
    }
  }
}

}  // namespace
}  // namespace quads

// Every byte of the codes and scales is written.
extern "C" int quads_unarrange(const quads::UnarrangeArgs* p, void* stream) {
  using namespace quads;
  if (p->experts == 0) return 0;
  if (p->k % 16 != 0 || p->kblocks % 4 != 0 || p->kblocks * 64 < p->k || p->row_tiles * 64 < p->rows) return cudaErrorInvalidValue;
  return launch(unarrange_kernel, dim3((unsigned)(p->experts * p->row_tiles)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), *p);
}
