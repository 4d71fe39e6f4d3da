// SPDX-License-Identifier: Apache-2.0
// Arguments and epilogue shared by the decode and the prefill GEMM.
#pragma once

#include <stdint.h>

#include "common.cuh"
#include "weights.cuh"

namespace quads {

// What a launcher gets from the host; mirrored field by field in vllm_quads/kernels/_native.py.
struct GemmArgs {
  const uint8_t* weights;    // prepared, [E][row tiles of 64][K / 64] blocks
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
  int row_tiles;             // row tiles of 64
  int ldb;                   // elements between operand rows
  int row_divisor;           // operand row = pair / row_divisor (top-k for the first GEMM, 1 for the second)
  int channels;              // valid output channels
  int ldo;                   // elements between output rows
  int bias_stride;
  int max_tokens;            // capacity of a segment
};

enum : int { kSwiGlu = 0, kPlain = 1 };

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, 1.0f + __expf(-x)); }

// Per-token values of a segment, kept in shared memory while its tiles are computed.
struct TokenMeta {
  int pair;
  float decode;
  float router;
};

// Writes one pair of accumulators (rows g and g + 8 of a 16-row brick) of one token.
//   SwiGLU: row g is channel c of gate, row g + 8 of up; one output channel.
//   Plain:  rows g and g + 8 are output channels 2c and 2c + 1.
// Order of the float32 operations: (accumulator * (alpha * 2^14)) * token scale + bias, then the activation.
template <int EPILOGUE, typename Out>
__device__ __forceinline__ void store_pair(const GemmArgs& p, int expert, float2 alpha, const TokenMeta& token, int c,
                                           float low, float high) {
  if (EPILOGUE == kSwiGlu) {
    if (c >= p.channels) return;
    float gate = low * alpha.x * token.decode;
    float up = high * alpha.y * token.decode;
    if (p.bias != nullptr) {
      const float* b = p.bias + (int64_t)expert * p.bias_stride;
      gate += b[c];
      up += b[p.channels + c];
    }
    reinterpret_cast<Out*>(p.out)[(int64_t)token.pair * p.ldo + c] = from_float<Out>(silu(gate) * up);
  } else {
    if (2 * c >= p.channels) return;  // channels is even
    float x = low * alpha.x * token.decode, y = high * alpha.y * token.decode;
    if (p.bias != nullptr) {
      const float* b = p.bias + (int64_t)expert * p.bias_stride;
      x += b[2 * c];
      y += b[2 * c + 1];
    }
    x *= token.router;
    y *= token.router;
    Out* out = reinterpret_cast<Out*>(p.out) + (int64_t)token.pair * p.ldo + 2 * c;
    if constexpr (sizeof(Out) == 4) {
      *reinterpret_cast<float2*>(out) = make_float2(x, y);
    } else {
      Out two[2] = {from_float<Out>(x), from_float<Out>(y)};
      *reinterpret_cast<uint32_t*>(out) = *reinterpret_cast<uint32_t*>(two);
    }
  }
}

__device__ __forceinline__ float2 load_alpha(const GemmArgs& p, int expert) {
  return make_float2(p.alpha[2 * expert] * kDecodeFactor, p.alpha[2 * expert + 1] * kDecodeFactor);
}

__device__ __forceinline__ TokenMeta load_token(const GemmArgs& p, int index) {
  TokenMeta t;
  t.pair = p.sorted[index];
  t.decode = p.decode[t.pair / p.row_divisor];
  t.router = p.router != nullptr ? p.router[t.pair] : 1.0f;
  return t;
}

}  // namespace quads
