// SPDX-License-Identifier: Apache-2.0
// Arguments, weight stream and epilogue shared by the GEMM kernels (moe_decode.cu, moe_wgmma.cuh).
#pragma once

#include <stdint.h>

#include "common.cuh"
#include "weights.cuh"

namespace quads {

// What a launcher gets from the host; mirrored field by field in vllm_quads/kernels/_native.py.
struct GemmArgs {
  const uint8_t* weights;    // prepared (weights.cuh), one matrix after the other
  const __half* operand;     // [rows, ldb]: q * s (merged with the residual), zero in [K, ldb)
  const float* decode;       // [rows]: decode global scale of each operand row
  const float* alpha;        // [E, 2]: decode global scale of the weights (gate, up), or twice the same
  const float* bias;         // [E, bias_stride] or null: added before the activation
  const float* router;       // [pairs] or null: factor of each output row
  const float* channel;      // [channels] or null: factor of each output channel (plain epilogue only)
  const int* segments;       // [num][3]: expert, first entry of `sorted`, count; null: one matrix, `rows` rows in order
  const int* num_segments;   // [1] at least; null like `segments`
  const int* sorted;         // pairs grouped by expert; null like `segments`
  void* out;                 // [pairs, ldo]
  int kblocks;               // K / 64, K padded
  int row_tiles;             // row tiles of 64, even
  int ldb;                   // elements between operand rows
  int row_divisor;           // operand row = pair / row_divisor (top-k for the first GEMM, 1 for the second)
  int channels;              // valid output channels, a multiple of 16
  int ldo;                   // elements between output rows
  int bias_stride;
  int max_tokens;            // capacity of a segment
  int rows;                  // operand rows, used without `segments`
  int splits;                // parts of K that become output rows of their own, [pairs, splits, ldo]; plain wgmma GEMMs only, else 1
};

// Per-token values of a segment.
struct alignas(16) TokenMeta {
  int64_t row;  // offset of the output row
  float decode;
  float router;
};

// Per-segment values; alpha already holds 2^14.
struct SegmentMeta {
  int expert;
  int count;
  float2 alpha;
};

// Rows that a block multiplies one expert's weights with. Loads are volatile: they may come before grid_dependency_wait.
struct Segment {
  int expert, start, count;
};

__device__ __forceinline__ int num_segments(const GemmArgs& p) {
  if (p.segments == nullptr) return (p.rows + p.max_tokens - 1) / p.max_tokens;
  return *(volatile const int*)p.num_segments;
}

__device__ __forceinline__ Segment segment_of(const GemmArgs& p, int i) {
  if (p.segments == nullptr) {  // equal parts
    const int n = num_segments(p), begin = (int)((int64_t)p.rows * i / n);
    return {0, begin, (int)((int64_t)p.rows * (i + 1) / n) - begin};
  }
  volatile const int* s = p.segments + 3 * i;
  return {s[0], s[1], s[2]};
}

__device__ __forceinline__ int expert_of(const GemmArgs& p, int segment) {
  return p.segments == nullptr ? 0 : ((volatile const int*)p.segments)[3 * segment];
}

__device__ __forceinline__ int pair_of(const GemmArgs& p, int entry) {
  return p.sorted == nullptr ? entry : p.sorted[entry];
}

__device__ __forceinline__ SegmentMeta load_segment(const GemmArgs& p, const Segment& segment) {
  SegmentMeta s;
  s.expert = segment.expert;
  s.count = segment.count;
  s.alpha = make_float2(p.alpha[2 * s.expert] * kDecodeFactor, p.alpha[2 * s.expert + 1] * kDecodeFactor);
  return s;
}

__device__ __forceinline__ TokenMeta load_token(const GemmArgs& p, int pair) {
  TokenMeta t;
  t.row = (int64_t)pair * p.splits * p.ldo;
  t.decode = p.decode[pair / p.row_divisor];
  t.router = p.router != nullptr ? p.router[pair] : 1.0f;
  return t;
}

// Bias of the two accumulator rows (g, g + 8) whose first output channel is c. `biases`: p.bias or null.
template <int EPILOGUE>
__device__ __forceinline__ float2 load_bias(const GemmArgs& p, const float* biases, int expert, int c) {
  if (biases == nullptr || c >= p.channels) return make_float2(0.0f, 0.0f);
  const float* b = biases + (int64_t)expert * p.bias_stride + c;
  return make_float2(b[0], b[EPILOGUE == kSwiGlu ? p.channels : 1]);
}

// Factor of these accumulators that is common to all tokens.
template <int EPILOGUE>
__device__ __forceinline__ float2 channel_alpha(const GemmArgs& p, const SegmentMeta& s, int c) {
  if (EPILOGUE == kSwiGlu || p.channel == nullptr || c >= p.channels) return s.alpha;
  return make_float2(s.alpha.x * p.channel[c], s.alpha.y * p.channel[c + 1]);
}

// x / (1 + exp(-x)) to about 2^-21; for x < -88 the quotient is 0.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Accumulators of rows g and g + 8 to outputs, in float32: fma(accumulator, alpha * token scale, bias), then the activation or the
// router weight.
template <int EPILOGUE>
__device__ __forceinline__ float2 finish(float low, float high, float2 scale, float2 bias, float router) {
  const float x = fmaf(low, scale.x, bias.x), y = fmaf(high, scale.y, bias.y);
  if (EPILOGUE == kSwiGlu) return make_float2(silu(x) * y, 0.0f);
  return make_float2(x * router, y * router);
}

// The weight bytes of one unit (TILES row tiles, all of K), a ring stage of KG K blocks at a time. A stage is [KG][TILES] blocks; where
// KG > 1 the unit lies within one group of row tiles (weights.cuh), otherwise in two at most.
template <int TILES, int KG>
struct WeightStream {
  static constexpr int kBytes = TILES * KG * kBlockBytes;  // of a stage
  static_assert(TILES % 2 == 0 && TILES <= 2 * kGroupTiles && (KG == 1 || TILES <= kGroupTiles), "");

  const uint8_t *source, *second;
  int tiles, more;      // row tiles of the unit in its first group, and in the next
  int stride, stride2;  // bytes of a K block of either group

  __device__ __forceinline__ WeightStream() {}
  // first_stage: stages left out.
  __device__ __forceinline__ WeightStream(const GemmArgs& p, int expert, int first_tile, int first_stage = 0) {
    const int within = first_tile % kGroupTiles, group = first_tile - within;
    tiles = tiles_of(p, first_tile);
    more = KG == 1 ? min(TILES - tiles, p.row_tiles - first_tile - tiles) : 0;
    const uint8_t* blocks = p.weights + ((int64_t)expert * p.row_tiles + group) * p.kblocks * kBlockBytes;
    stride = min(kGroupTiles, p.row_tiles - group) * kBlockBytes;
    stride2 = min(kGroupTiles, p.row_tiles - group - kGroupTiles) * kBlockBytes;
    source = blocks + within * kBlockBytes;
    second = blocks + (int64_t)kGroupTiles * p.kblocks * kBlockBytes;
    skip(first_stage);
  }

  // Row tiles of a unit in its first group. Groups hold an even number of tiles.
  static __device__ __forceinline__ int tiles_of(const GemmArgs& p, int first_tile) {
    return min(min(kGroupTiles - first_tile % kGroupTiles, TILES), p.row_tiles - first_tile);
  }

  // Offset of the block of row tile `tile` of the unit and K block `kg` of the stage.
  static __device__ __forceinline__ uint32_t offset(const GemmArgs& p, int first_tile, int tile, int kg) {
    return ((KG == 1 ? 0 : kg * tiles_of(p, first_tile)) + tile) * kBlockBytes;
  }

  __device__ __forceinline__ void skip(int stages) {
    source += stages * KG * stride;
    second += stages * stride2;
  }

  // Copy the next stage to `target`; `bar` counts its bytes.
  __device__ __forceinline__ void next(uint32_t target, uint32_t bar) {
    mbar_expect_tx(bar, (tiles + more) * KG * kBlockBytes);
    if (KG == 1 || TILES == kGroupTiles) {
      bulk_copy(target, source, tiles * KG * kBlockBytes, bar);
    } else {
#pragma unroll 1
      for (int i = 0; i < KG; ++i) bulk_copy(target + i * tiles * kBlockBytes, source + i * stride, tiles * kBlockBytes, bar);
    }
    if (KG == 1 && more > 0) bulk_copy(target + tiles * kBlockBytes, second, more * kBlockBytes, bar);
    skip(1);
  }
};

// N adjacent outputs; the address is a multiple of their size.
template <int N, typename Out>
__device__ __forceinline__ void store_adjacent(Out* out, const float (&v)[N]) {
  struct alignas(N * sizeof(Out)) Vector {
    Out v[N];
  } packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.v[i] = from_float<Out>(v[i]);
  *reinterpret_cast<Vector*>(out) = packed;
}

}  // namespace quads
