// SPDX-License-Identifier: Apache-2.0
// The wgmma GEMM for large token counts: units of 256 rows x up to 160 tokens of one expert, bound by the tensor cores.
#include "moe_wgmma.cuh"

// See launch_wgmma.
extern "C" int quads_moe_prefill(const quads::GemmArgs* args, int epilogue, int out_dtype, int early_weights, void* stream) {
  using namespace quads;
  return launch_wgmma<WgmmaShape<2, 1, 2, 160>>(*args, epilogue, out_dtype, early_weights, static_cast<cudaStream_t>(stream));
}
