// SPDX-License-Identifier: Apache-2.0
// Packed weights of a checkpoint to the prepared layout (weights.cuh) and back, at the speed of memory.
//
// A block takes bricks (16 rows) in turn, a warp four K blocks of one at a time: lane (g, t) reads or writes K block t of rows g and
// g + 8 in the packed form (32 bytes of either row, 128 with its three neighbours), and owns byte t of every 32 bits of all four K
// blocks in the prepared form; a 4x4 byte transpose among these four lanes, two shuffles a word, leads from one to the other. The
// words themselves are linear over GF(2) in the codes: four table lookups by byte and three XORs, instead of some 50 bit operations.
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
constexpr int kBlocksPerSm = 7;

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

// 32 bytes of codes and 4 of scales of one row and K block, as far as the row has them.
__device__ __forceinline__ void load_row(const uint8_t* codes, const uint8_t* scales, int steps, bool wide, uint32_t (&x)[8], uint32_t& s) {
  if (wide && steps >= 4) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(codes)), b = __ldg(reinterpret_cast<const uint4*>(codes) + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 v = i < steps ? __ldg(reinterpret_cast<const uint2*>(codes) + i) : make_uint2(0, 0);
      x[2 * i] = v.x, x[2 * i + 1] = v.y;
    }
  }
  s = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < steps) s |= e5m3_from_e4m3(__ldg(scales + i)) << 8 * i;
}

__device__ __forceinline__ void store_row(uint8_t* codes, uint8_t* scales, int steps, bool wide, const uint32_t (&x)[8], uint32_t s) {
  if (wide && steps >= 4) {
    reinterpret_cast<uint4*>(codes)[0] = make_uint4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<uint4*>(codes)[1] = make_uint4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < steps) reinterpret_cast<uint2*>(codes)[i] = make_uint2(x[2 * i], x[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < steps) scales[i] = (uint8_t)e4m3_from_e5m3(byte_of(s, i));
}

template <bool INVERSE>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) arrange_kernel(const ArrangeArgs p) {
  __shared__ uint32_t table[4][256];
  for (int i = threadIdx.x; i < 1024; i += kThreads) table[i / 256][i % 256] = contribution<INVERSE>(i / 256, i % 256);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int bricks = p.row_tiles * 4, total_steps = p.k / 16;
  const bool wide = p.k % 32 == 0;  // rows start at multiples of 16 bytes
  for (int64_t item = blockIdx.x; item < (int64_t)p.experts * bricks; item += gridDim.x) {
    const int expert = (int)(item / bricks), tile = (int)(item % bricks) / 4, brick = (int)(item % bricks) % 4;
    const int2 rows = source_rows(p, tile, brick, g);
    const int64_t row[2] = {(int64_t)expert * p.rows + rows.x, (int64_t)expert * p.rows + rows.y};
    const int first = tile / kGroupTiles * kGroupTiles, tiles = min(kGroupTiles, p.row_tiles - first);
    uint8_t* const group = p.blocks + (((int64_t)expert * p.row_tiles + first) * p.kblocks + tile - first) * kBlockBytes;
    for (int kb = warp * 4; kb < p.kblocks; kb += kWarps * 4) {
      const int step = (kb + t) * 4;
      const int steps[2] = {rows.x < 0 ? 0 : total_steps - step, rows.y < 0 ? 0 : total_steps - step};  // of this lane's K block
      uint8_t* const own = group + (int64_t)(kb + t) * tiles * kBlockBytes + kScaleOffset + brick * 64 + g * 8;
      uint32_t x[2][8], s[2];  // [row half][2 k-step + k half]
      [[maybe_unused]] uint32_t c[4][4];  // [K block][k-step]: codes, register q at byte q
      if constexpr (!INVERSE) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          load_row(p.codes + row[r] * (p.k / 2) + step * 8, p.scales + row[r] * total_steps + step, steps[r], wide, x[r], s[r]);
        *reinterpret_cast<uint2*>(own) =
            make_uint2(encode_scales(byte_of(s[0], 0), byte_of(s[1], 0), byte_of(s[0], 1), byte_of(s[1], 1)),
                       encode_scales(byte_of(s[0], 2), byte_of(s[1], 2), byte_of(s[0], 3), byte_of(s[1], 3)));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int i = 0; i < 8; ++i) x[r][i] = transpose_bytes(x[r][i], t);  // byte j: of K block kb + j
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint4* const at = reinterpret_cast<uint4*>(group + (int64_t)(kb + j) * tiles * kBlockBytes + brick * 512) + lane;
        if constexpr (!INVERSE) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            words[i] = table[0][byte_of(x[0][2 * i], j)] ^ table[1][byte_of(x[1][2 * i], j)] ^
                       table[2][byte_of(x[0][2 * i + 1], j)] ^ table[3][byte_of(x[1][2 * i + 1], j)];
          *at = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
          const uint4 raw = __ldg(at);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t w = word_of(raw, i);
            c[j][i] = table[0][byte_of(w, 0)] ^ table[1][byte_of(w, 1)] ^ table[2][byte_of(w, 2)] ^ table[3][byte_of(w, 3)];
          }
        }
      }
      if constexpr (INVERSE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // register q of K block j: byte q of c[j] to byte j of its word
          const uint32_t low[2] = {__byte_perm(c[0][i], c[1][i], 0x5140), __byte_perm(c[2][i], c[3][i], 0x5140)};
          const uint32_t high[2] = {__byte_perm(c[0][i], c[1][i], 0x7362), __byte_perm(c[2][i], c[3][i], 0x7362)};
          x[0][2 * i] = __byte_perm(low[0], low[1], 0x5410);
          x[1][2 * i] = __byte_perm(low[0], low[1], 0x7632);
          x[0][2 * i + 1] = __byte_perm(high[0], high[1], 0x5410);
          x[1][2 * i + 1] = __byte_perm(high[0], high[1], 0x7632);
        }
        const uint2 words = __ldg(reinterpret_cast<const uint2*>(own));
        uint32_t even[4], odd[4];
        decode_scale_word(words.x, even);
        decode_scale_word(words.y, odd);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          s[r] = even[r] | even[2 + r] << 8 | odd[r] << 16 | odd[2 + r] << 24;
#pragma unroll
          for (int i = 0; i < 8; ++i) x[r][i] = transpose_bytes(x[r][i], t);
          store_row(p.codes + row[r] * (p.k / 2) + step * 8, p.scales + row[r] * total_steps + step, steps[r], wide, x[r], s[r]);
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
