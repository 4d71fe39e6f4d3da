// SPDX-License-Identifier: Apache-2.0
// Packed weights of a checkpoint to the prepared layout (weights.cuh) and back, at the speed of memory.
//
// A block takes bricks (16 rows) in turn, its warps consecutive K blocks of the same rows. Lane (g, t) holds k-step t of rows g and
// g + 8 in the packed form (8 bytes of one row: the four lanes of a g read 32 bytes), and byte t of all four k-steps in the prepared
// form; a 4x4 byte transpose among these four lanes, two shuffles a word, leads from one to the other. The words themselves are
// linear over GF(2) in the codes: four table lookups by byte and three XORs, instead of some 50 bit operations.
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

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 9;

// Source rows of brick rows g and g + 8; -1 for padding.
__device__ __forceinline__ int2 source_rows(const ArrangeArgs& p, int tile, int brick, int g) {
  if (p.gate_up) {
    const int half = p.rows / 2, c = channel_of<kSwiGlu>(tile, brick, g);
    return c < half ? make_int2(c, c + half) : make_int2(-1, -1);
  }
  const int c = channel_of<kPlain>(tile, brick, g);
  return make_int2(c < p.rows ? c : -1, c + 1 < p.rows ? c + 1 : -1);
}

// Lane t of four holds bytes 0..3 of x; afterwards it holds byte t of lanes 0..3. Its own inverse.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t x, int t) {
  uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  x = __byte_perm(x, y, t & 1 ? 0x3715 : 0x6240);
  y = __shfl_xor_sync(0xFFFFFFFFu, x, 2);
  return __byte_perm(x, y, t & 2 ? 0x3276 : 0x5410);
}

// What byte `position` (0..3) contributes: of the packed codes of registers a0..a3 to a word; of a word to the codes of the registers,
// register j at byte j.
template <bool INVERSE>
__device__ __forceinline__ uint32_t contribution(int position, uint32_t byte) {
  uint32_t a[4] = {0, 0, 0, 0};
  if constexpr (INVERSE) {
    decode_bits(byte << 8 * position, a);
    return gather_byte(a[0]) | gather_byte(a[1]) << 8 | gather_byte(a[2]) << 16 | gather_byte(a[3]) << 24;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j == position) a[j] = spread_byte(byte);
    return encode_word(a[0], a[1], a[2], a[3]);
  }
}

__device__ __forceinline__ uint32_t byte_of(uint32_t x, int i) { return x >> 8 * i & 0xFFu; }

template <bool INVERSE>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) arrange_kernel(const ArrangeArgs p) {
  __shared__ uint32_t table[4][256];
  for (int i = threadIdx.x; i < 1024; i += kThreads) table[i / 256][i % 256] = contribution<INVERSE>(i / 256, i % 256);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int bricks = p.row_tiles * 4, steps = p.k / 16, code_row = p.k / 2;
  for (int64_t item = blockIdx.x; item < (int64_t)p.experts * bricks; item += gridDim.x) {
    const int expert = (int)(item / bricks), tile = (int)(item % bricks) / 4, brick = (int)(item % bricks) % 4;
    const int2 rows = source_rows(p, tile, brick, g);
    const bool valid[2] = {rows.x >= 0, rows.y >= 0};
    uint8_t* codes[2];
    uint8_t* scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = (int64_t)expert * p.rows + (valid[r] ? (r == 0 ? rows.x : rows.y) : 0);
      codes[r] = p.codes + row * code_row;
      scales[r] = p.scales + row * steps;
    }
    const int first = tile / kGroupTiles * kGroupTiles, tiles = min(kGroupTiles, p.row_tiles - first);
    uint8_t* const group = p.blocks + ((int64_t)expert * p.row_tiles + first) * p.kblocks * kBlockBytes;
#pragma unroll 2
    for (int kb = warp; kb < p.kblocks; kb += kWarps) {
      uint8_t* const block = group + (int64_t)(kb * tiles + tile - first) * kBlockBytes;
      uint4* const words_at = reinterpret_cast<uint4*>(block + brick * 512 + lane * 16);
      // k-steps 0, 1 and 2, 3 share a scale word: lanes with t = 0, 1 and 2, 3
      uint32_t* const scale_at = reinterpret_cast<uint32_t*>(block + kScaleOffset + brick * 64 + g * 8 + t / 2 * 4);
      const int step = kb * 4 + t;
      uint32_t x[2][2];  // [row half][k half]
      if constexpr (!INVERSE) {
        uint32_t s[2] = {0, 0};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint2 v = make_uint2(0, 0);
          if (valid[r] && step < steps) {
            v = __ldg(reinterpret_cast<const uint2*>(codes[r] + step * 8));
            s[r] = e5m3_from_e4m3(__ldg(scales[r] + step));
          }
          x[r][0] = transpose_bytes(v.x, t);
          x[r][1] = transpose_bytes(v.y, t);
        }
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = table[0][byte_of(x[0][0], i)] ^ table[1][byte_of(x[1][0], i)] ^ table[2][byte_of(x[0][1], i)] ^
                     table[3][byte_of(x[1][1], i)];
        *words_at = make_uint4(words[0], words[1], words[2], words[3]);
        const uint32_t odd_low = __shfl_down_sync(0xFFFFFFFFu, s[0], 1), odd_high = __shfl_down_sync(0xFFFFFFFFu, s[1], 1);
        if (t % 2 == 0) *scale_at = encode_scales(s[0], s[1], odd_low, odd_high);
      } else {
        const uint4 raw = __ldg(words_at);
        uint32_t s[4], c[4];  // c[i]: the codes of k-step i, register j at byte j
        decode_scale_word(__ldg(scale_at), s);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t w = word_of(raw, i);
          c[i] = table[0][byte_of(w, 0)] ^ table[1][byte_of(w, 1)] ^ table[2][byte_of(w, 2)] ^ table[3][byte_of(w, 3)];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // byte j of the four k-steps
          const uint32_t low = __byte_perm(c[0], c[1], j | (j + 4) << 4), high = __byte_perm(c[2], c[3], j | (j + 4) << 4);
          x[j & 1][j >> 1] = transpose_bytes(__byte_perm(low, high, 0x5410), t);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!valid[r] || step >= steps) continue;
          *reinterpret_cast<uint2*>(codes[r] + step * 8) = make_uint2(x[r][0], x[r][1]);
          scales[r][step] = (uint8_t)e4m3_from_e5m3(t & 1 ? s[2 + r] : s[r]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace quads

// inverse: 0 packed to prepared, 1 prepared to packed. Every byte of the target is written.
extern "C" int quads_arrange(const quads::ArrangeArgs* p, int inverse, void* stream) {
  using namespace quads;
  if (p->experts == 0) return 0;
  if (p->k % 16 != 0 || p->kblocks % 4 != 0 || p->kblocks * 64 < p->k || p->row_tiles * 64 < p->rows) return cudaErrorInvalidValue;
  const int64_t items = (int64_t)p->experts * p->row_tiles * 4, most = (int64_t)multiprocessors() * kBlocksPerSm;
  const dim3 grid((unsigned)(items < most ? items : most));
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (inverse)
    arrange_kernel<true><<<grid, kThreads, 0, s>>>(*p);
  else
    arrange_kernel<false><<<grid, kThreads, 0, s>>>(*p);
  return cudaGetLastError();
}
