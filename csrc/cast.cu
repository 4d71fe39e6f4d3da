// SPDX-License-Identifier: Apache-2.0
// Unquantized activations as GEMM operands (W4A16): each row in FP16 times a power of two that puts its largest magnitude into
// [2^14, 2^15). BF16 keeps all its bits down to 2^-29 of the row's largest, below that the error is 2^-40 of it; FP16 input likewise.
#include "common.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct CastArgs {
  const void* x;     // [rows, ldx] bfloat16 or float16
  const int* group;  // [rows] or null: negative rows are skipped
  __half* operand;   // [rows, ldm], zero in [k, ldm)
  float* decode;     // [rows]: the inverse factor
  int rows, k, ldx, ldm;
};

namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) cast_kernel(const CastArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int row = blockIdx.x;
  if (p.group != nullptr && p.group[row] < 0) return;
  const T* x = static_cast<const T*>(p.x) + (int64_t)row * p.ldx;
  float m = 0.0f;
  bool finite = true;
  for (int c = threadIdx.x * 8; c < p.k; c += kThreads * 8) {
    const uint4 raw = *reinterpret_cast<const uint4*>(x + c);
    const T* v = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float magnitude = fabsf(to_float<T>(v[i]));
      finite &= magnitude < __int_as_float(0x7F800000);
      m = fmaxf(m, magnitude);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
  __shared__ float partial[kThreads / 32];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
  // Rows with NaN or infinity stay as they are: x in FP16.
  finite = __syncthreads_and(finite);
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) m = fmaxf(m, partial[i]);
  const int exponent = (int)(__float_as_uint(m) >> 23) - 127;
  const int shift = !finite || m == 0.0f ? 0 : min(14 - exponent, 126);
  const float factor = __int_as_float((127 + shift) << 23);
  if (threadIdx.x == 0) p.decode[row] = __int_as_float((127 - shift) << 23);
  for (int c = threadIdx.x * 8; c < p.ldm; c += kThreads * 8) {
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (c < p.k) {
      const uint4 raw = *reinterpret_cast<const uint4*>(x + c);
      const T* v = reinterpret_cast<const T*>(&raw);
      __half* h = reinterpret_cast<__half*>(&packed);
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] = __float2half_rn(to_float<T>(v[i]) * factor);
    }
    *reinterpret_cast<uint4*>(p.operand + (int64_t)row * p.ldm + c) = packed;
  }
}

}  // namespace
}  // namespace quads

// in_dtype: 0 bfloat16, 1 float16.
extern "C" int quads_cast(const quads::CastArgs* p, int in_dtype, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p->rows == 0) return 0;
  if (p->k % 8 != 0 || p->ldm % 8 != 0) return cudaErrorInvalidValue;
  if (in_dtype == 0) return launch(cast_kernel<__nv_bfloat16>, dim3(p->rows), dim3(kThreads), 0, s, *p);
  return launch(cast_kernel<__half>, dim3(p->rows), dim3(kThreads), 0, s, *p);
}
