// SPDX-License-Identifier: Apache-2.0
// The sum over a token's pairs that ends a layer, as a part of whatever kernel does it.
#pragma once

#include "common.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct SumArgs {
  const void* y;           // [pairs << shift, ldy]
  const int* pair_expert;  // [pairs] or null (all are valid): negative pairs are left out
  void* out;               // [tokens, ldo]
  int64_t ldo;
  int tokens, top_k, columns, ldy;
  int shift;               // log2 of the K splits of a pair
};

template <typename T>
struct alignas(16) Vec {
  T v[16 / sizeof(T)];
};

template <typename In>
unsigned sum_blocks(const SumArgs& p, int threads) {
  const int64_t items = (int64_t)p.tokens * (p.columns / (16 / (int)sizeof(In)));
  const int64_t blocks = (items + threads - 1) / threads;
  return (unsigned)(blocks < 16 * 1024 ? blocks : 16 * 1024);
}

// out[t, :] = sum over the token's valid pairs and their K splits of y[pair, split, :], in this order, float32, one rounding.
// The share of one of `blocks` thread blocks. SPLIT: false only without splits and with `pair_expert`.
template <typename In, typename Out, bool SPLIT, int THREADS>
__device__ __forceinline__ void sum_pairs(const SumArgs& p, unsigned block, unsigned blocks) {
  constexpr int W = 16 / sizeof(In);
  const In* const y = static_cast<const In*>(p.y);
  const int per_row = p.columns / W, shift = SPLIT ? p.shift : 0;
  for (int64_t i = (int64_t)block * THREADS + threadIdx.x; i < (int64_t)p.tokens * per_row; i += (int64_t)blocks * THREADS) {
    const int token = (int)(i / per_row), c = (int)(i % per_row) * W;
    float sum[W];
#pragma unroll
    for (int j = 0; j < W; ++j) sum[j] = 0.0f;
#pragma unroll 8
    for (int k = 0; k < p.top_k << shift; ++k) {
      const int row = (token * p.top_k << shift) + k;
      const Vec<In> v = *reinterpret_cast<const Vec<In>*>(y + (int64_t)row * p.ldy + c);  // without a wait for its expert
      const bool counts = SPLIT && p.pair_expert == nullptr ? true : p.pair_expert[row >> shift] >= 0;
#pragma unroll
      for (int j = 0; j < W; ++j) sum[j] += counts ? to_float<In>(v.v[j]) : 0.0f;
    }
    Out* target = static_cast<Out*>(p.out) + (int64_t)token * p.ldo + c;
    alignas(16) Out rounded[W];
#pragma unroll
    for (int j = 0; j < W; ++j) rounded[j] = from_float<Out>(sum[j]);
    if constexpr (sizeof(Out) * W == 16)
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(rounded);
    else
      *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(rounded);
  }
}

}  // namespace quads
