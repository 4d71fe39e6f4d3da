// SPDX-License-Identifier: Apache-2.0
// The wgmma GEMM for medium token counts, bound by the weight bytes: four consumer warpgroups decode, up to 64 tokens of one expert
// at a time. Units of 512, 256 or 128 rows, the smaller ones with K shared out among 2 or 4 warpgroups.
#include "moe_wgmma.cuh"

// See launch_wgmma; k_groups: 1, 2 or 4.
extern "C" int quads_moe_batch(const quads::GemmArgs* args, int epilogue, int out_dtype, int k_groups, int early_weights,
                               void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (k_groups == 1) return launch_wgmma<WgmmaShape<4, 1, 2, 64>>(*args, epilogue, out_dtype, early_weights, s);
  if (k_groups == 2) return launch_wgmma<WgmmaShape<2, 2, 2, 64>>(*args, epilogue, out_dtype, early_weights, s);
  if (k_groups == 4) return launch_wgmma<WgmmaShape<1, 4, 2, 64>>(*args, epilogue, out_dtype, early_weights, s);
  return cudaErrorInvalidValue;
}

// Between batch and prefill: three consumers, units of 384 rows x up to 96 tokens.
extern "C" int quads_moe_wide(const quads::GemmArgs* args, int epilogue, int out_dtype, int early_weights, void* stream) {
  using namespace quads;
  return launch_wgmma<WgmmaShape<3, 1, 2, 96>>(*args, epilogue, out_dtype, early_weights, static_cast<cudaStream_t>(stream));
}

// Most tokens of a segment (a multiple of 8, at most 64) that the smallest ring leaves room for.
extern "C" int quads_moe_batch_capacity(int k_groups) {
  using namespace quads;
  for (int tokens = 64; tokens > 0; tokens -= 8) {
    const int stages = k_groups == 1   ? WgmmaShape<4, 1, 2, 64>::layout(tokens).stages
                       : k_groups == 2 ? WgmmaShape<2, 2, 2, 64>::layout(tokens).stages
                                       : WgmmaShape<1, 4, 2, 64>::layout(tokens).stages;
    if (stages >= WgmmaShape<4, 1, 2, 64>::kMinStages) return tokens;
  }
  return 0;
}
