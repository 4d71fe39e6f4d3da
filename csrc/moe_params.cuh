// SPDX-License-Identifier: Apache-2.0
// Arguments and epilogue shared by the decode and the prefill GEMM.
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
  const int* segments;       // [num][3]: expert, first entry of `sorted`, count
  const int* num_segments;   // [1]
  const int* sorted;         // pairs grouped by expert
  void* out;                 // [pairs, ldo]
  int kblocks;               // K / 64, K padded
  int row_tiles;             // row tiles of 64, even
  int ldb;                   // elements between operand rows
  int row_divisor;           // operand row = pair / row_divisor (top-k for the first GEMM, 1 for the second)
  int channels;              // valid output channels, a multiple of 16
  int ldo;                   // elements between output rows
  int bias_stride;
  int max_tokens;            // capacity of a segment
};

// SwiGLU: row g of a brick is a channel of gate, row g + 8 the same channel of up; one output channel.
// Plain:  rows g and g + 8 are two adjacent output channels.
enum : int { kSwiGlu = 0, kPlain = 1 };

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

__device__ __forceinline__ SegmentMeta load_segment(const GemmArgs& p, int segment) {
  SegmentMeta s;
  s.expert = p.segments[3 * segment];
  s.count = p.segments[3 * segment + 2];
  s.alpha = make_float2(p.alpha[2 * s.expert] * kDecodeFactor, p.alpha[2 * s.expert + 1] * kDecodeFactor);
  return s;
}

__device__ __forceinline__ TokenMeta load_token(const GemmArgs& p, int pair) {
  TokenMeta t;
  t.row = (int64_t)pair * p.ldo;
  t.decode = p.decode[pair / p.row_divisor];
  t.router = p.router != nullptr ? p.router[pair] : 1.0f;
  return t;
}

// First output channel of row g of a brick. Two adjacent row tiles interleave their channels, so that a thread that owns the same
// row of both writes adjacent channels (layout.py: gate_up_order, pair_order).
template <int EPILOGUE>
__device__ __forceinline__ int channel_of(int row_tile, int brick, int g) {
  const int pair = row_tile >> 1, odd = row_tile & 1;
  return EPILOGUE == kSwiGlu ? pair * 64 + brick * 16 + 2 * g + odd : pair * 128 + brick * 32 + 4 * g + 2 * odd;
}

// Bias of the two accumulator rows (g, g + 8) whose first output channel is c.
template <int EPILOGUE>
__device__ __forceinline__ float2 load_bias(const GemmArgs& p, int segment, int c) {
  if (p.bias == nullptr || c >= p.channels) return make_float2(0.0f, 0.0f);
  const float* b = p.bias + (int64_t)p.segments[3 * segment] * p.bias_stride + c;
  return make_float2(b[0], b[EPILOGUE == kSwiGlu ? p.channels : 1]);
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
