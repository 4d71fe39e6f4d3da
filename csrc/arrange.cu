// SPDX-License-Identifier: Apache-2.0
// Packed weights of a checkpoint to the prepared layout (weights.cuh) and back, at the speed of memory.
//
// A warp owns a brick (16 rows x 64 k) and consecutive warps own consecutive K blocks of the same rows. Lane (g, t) holds k-step t of
// rows g and g + 8 in the packed form (8 bytes of one row: the four lanes of a g read 32 bytes), and byte t of all four k-steps in
// the prepared form; a 4x4 byte transpose among these four lanes, two shuffles a word, leads from one to the other.
#include "arrange_math.cuh"
#include "common.cuh"
#include "moe_params.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct ArrangeArgs {
  uint8_t* codes;   // [E, rows, k / 2]
  uint8_t* scales;  // [E, rows, k / 16] E4M3
  uint8_t* blocks;  // [E, row_tiles * kblocks, 2304]
  int experts, rows, k;
  int row_tiles, kblocks;
  int gate_up;      // 1: rows are I of gate, then I of up
};

namespace {

constexpr int kThreads = 256;

// Source rows of brick rows g and g + 8; -1 for padding.
__device__ __forceinline__ int2 source_rows(const ArrangeArgs& p, int tile, int brick, int g) {
  if (p.gate_up) {
    const int half = p.rows / 2, c = channel_of<kSwiGlu>(tile, brick, g);
    return c < half ? make_int2(c, c + half) : make_int2(-1, -1);
  }
  const int c = channel_of<kPlain>(tile, brick, g);
  return make_int2(c < p.rows ? c : -1, c + 1 < p.rows ? c + 1 : -1);
}

__device__ __forceinline__ uint8_t* block_of(const ArrangeArgs& p, int expert, int tile, int kb) {
  const int first = tile / kGroupTiles * kGroupTiles, tiles = min(kGroupTiles, p.row_tiles - first);
  return p.blocks + ((int64_t)expert * p.row_tiles * p.kblocks + (int64_t)first * p.kblocks + kb * tiles + tile - first) * kBlockBytes;
}

// Lane t of four holds bytes 0..3 of x; afterwards it holds byte t of lanes 0..3. Its own inverse.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t x, int t) {
  uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  x = __byte_perm(x, y, t & 1 ? 0x3715 : 0x6240);
  y = __shfl_xor_sync(0xFFFFFFFFu, x, 2);
  return __byte_perm(x, y, t & 2 ? 0x3276 : 0x5410);
}

struct Place {
  int tile, brick, kb, g, t;
  bool valid;
  __device__ __forceinline__ explicit Place(const ArrangeArgs& p) {
    const int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    kb = warp % p.kblocks;
    brick = warp / p.kblocks % 4;
    tile = warp / p.kblocks / 4;
    g = lane >> 2;
    t = lane & 3;
    valid = tile < p.row_tiles;
  }
};

__global__ void __launch_bounds__(kThreads) arrange_kernel(const ArrangeArgs p) {
  const Place at(p);
  if (!at.valid) return;
  const int lane = threadIdx.x % 32, expert = blockIdx.y;
  const int2 rows = source_rows(p, at.tile, at.brick, at.g);
  const uint8_t* codes = p.codes + (int64_t)expert * p.rows * (p.k / 2);
  const uint8_t* scales = p.scales + (int64_t)expert * p.rows * (p.k / 16);
  uint8_t* block = block_of(p, expert, at.tile, at.kb);

  const int step = at.kb * 4 + at.t, steps = p.k / 16;
  uint2 v[2] = {make_uint2(0, 0), make_uint2(0, 0)};
  uint32_t s[2] = {0, 0};
  if (step < steps) {
    if (rows.x >= 0) {
      v[0] = *reinterpret_cast<const uint2*>(codes + (int64_t)rows.x * (p.k / 2) + step * 8);
      s[0] = e5m3_from_e4m3(scales[(int64_t)rows.x * steps + step]);
    }
    if (rows.y >= 0) {
      v[1] = *reinterpret_cast<const uint2*>(codes + (int64_t)rows.y * (p.k / 2) + step * 8);
      s[1] = e5m3_from_e4m3(scales[(int64_t)rows.y * steps + step]);
    }
  }
  uint32_t x[2][2];  // [row half][k half]
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    x[r][0] = transpose_bytes(v[r].x, at.t);
    x[r][1] = transpose_bytes(v[r].y, at.t);
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = encode_word(spread_byte(x[0][0] >> 8 * i & 0xFFu), spread_byte(x[1][0] >> 8 * i & 0xFFu),
                           spread_byte(x[0][1] >> 8 * i & 0xFFu), spread_byte(x[1][1] >> 8 * i & 0xFFu));
  *reinterpret_cast<uint4*>(block + at.brick * 512 + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  // lanes with even t hold an even k-step, their neighbours the odd one
  const uint32_t odd_low = __shfl_down_sync(0xFFFFFFFFu, s[0], 1), odd_high = __shfl_down_sync(0xFFFFFFFFu, s[1], 1);
  if (at.t % 2 == 0)
    *reinterpret_cast<uint32_t*>(block + kScaleOffset + at.brick * 64 + at.g * 8 + at.t * 2) =
        encode_scales(s[0], s[1], odd_low, odd_high);
}

__global__ void __launch_bounds__(kThreads) unarrange_kernel(const ArrangeArgs p) {
  const Place at(p);
  if (!at.valid) return;
  const int lane = threadIdx.x % 32, expert = blockIdx.y;
  const int2 rows = source_rows(p, at.tile, at.brick, at.g);
  uint8_t* codes = p.codes + (int64_t)expert * p.rows * (p.k / 2);
  uint8_t* scales = p.scales + (int64_t)expert * p.rows * (p.k / 16);
  const uint8_t* block = block_of(p, expert, at.tile, at.kb);

  const uint4 raw = *reinterpret_cast<const uint4*>(block + at.brick * 512 + lane * 16);
  const uint32_t scale_word = *reinterpret_cast<const uint32_t*>(block + kScaleOffset + at.brick * 64 + at.g * 8 + at.t / 2 * 4);
  uint32_t x[2][2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a[4];
    decode_bits(word_of(raw, i), a);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j & 1][j >> 1] |= gather_byte(a[j]) << 8 * i;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) x[r][h] = transpose_bytes(x[r][h], at.t);
  uint32_t s[4];
  decode_scale_word(scale_word, s);
  const int step = at.kb * 4 + at.t, steps = p.k / 16;
  if (step >= steps) return;
  if (rows.x >= 0) {
    *reinterpret_cast<uint2*>(codes + (int64_t)rows.x * (p.k / 2) + step * 8) = make_uint2(x[0][0], x[0][1]);
    scales[(int64_t)rows.x * steps + step] = (uint8_t)e4m3_from_e5m3(at.t & 1 ? s[2] : s[0]);
  }
  if (rows.y >= 0) {
    *reinterpret_cast<uint2*>(codes + (int64_t)rows.y * (p.k / 2) + step * 8) = make_uint2(x[1][0], x[1][1]);
    scales[(int64_t)rows.y * steps + step] = (uint8_t)e4m3_from_e5m3(at.t & 1 ? s[3] : s[1]);
  }
}

}  // namespace
}  // namespace quads

// inverse: 0 packed to prepared, 1 prepared to packed. Every byte of the target is written.
extern "C" int quads_arrange(const quads::ArrangeArgs* p, int inverse, void* stream) {
  using namespace quads;
  if (p->experts == 0) return 0;
  if (p->k % 16 != 0 || p->kblocks * 64 < p->k || p->row_tiles * 64 < p->rows || p->experts > 65535) return cudaErrorInvalidValue;
  const int64_t warps = (int64_t)p->row_tiles * p->kblocks * 4;
  const dim3 grid((unsigned)((warps + kThreads / 32 - 1) / (kThreads / 32)), p->experts);
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (inverse)
    unarrange_kernel<<<grid, kThreads, 0, s>>>(*p);
  else
    arrange_kernel<<<grid, kThreads, 0, s>>>(*p);
  return cudaGetLastError();
}
