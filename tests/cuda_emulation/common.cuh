// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/common.cuh where a CUDA source is compiled by a host compiler: thread blocks run one after the other, each
// CUDA thread in a thread of its own. For tests of indexing and bookkeeping on machines without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static  // of its kernel instance: blocks run one after the other
#define __launch_bounds__(...)
#define cudaGetErrorString(code) "error"

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx;
inline Index blockIdx, gridDim, blockDim;

namespace emulation {
inline std::vector<float4> dynamic_shared;
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
inline uint32_t lanes[64][32];
inline std::mutex atomics;
inline void (*before_block)() = nullptr;

// One value of each lane of the warp, all at once.
template <typename F>
auto exchange(uint32_t value, F read) {
  const unsigned warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = value;
  warp_barriers[warp]->arrive_and_wait();
  const auto result = read(lanes[warp]);
  warp_barriers[warp]->arrive_and_wait();
  return result;
}

template <typename T>
T shuffle(T v, int lane) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  u = exchange(u, [&](const uint32_t* all) { return all[lane]; });
  std::memcpy(&v, &u, 4);
  return v;
}
}  // namespace emulation

inline void __syncthreads() { emulation::block_barrier->arrive_and_wait(); }
inline bool __syncthreads_or(bool vote) {
  static std::atomic<int> votes[2];
  static thread_local int round = 0;
  std::atomic<int>& all = votes[round++ % 2];
  all += vote;
  __syncthreads();
  const bool result = all > 0;
  __syncthreads();
  if (threadIdx.x == 0) all = 0;
  return result;
}
inline void __threadfence() {}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) { return emulation::shuffle(v, (threadIdx.x % 32) ^ mask); }
template <typename T>
T __shfl_sync(unsigned, T v, int lane) { return emulation::shuffle(v, lane); }
template <typename T>
T __shfl_up_sync(unsigned, T v, int offset) {
  const int lane = threadIdx.x % 32;
  return emulation::shuffle(v, lane >= offset ? lane - offset : lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulation::exchange(vote, [](const uint32_t* all) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (all[i] & 1u) << i;
    return bits;
  });
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <typename T>
T atomicAdd(T* target, T value) {
  std::lock_guard<std::mutex> lock(emulation::atomics);
  const T before = *target;
  *target = before + value;
  return before;
}
template <typename T>
T atomicOr(T* target, T value) {
  std::lock_guard<std::mutex> lock(emulation::atomics);
  const T before = *target;
  *target = before | value;
  return before;
}
template <typename T>
T __ldcs(const T* at) { return *at; }
template <typename T>
T __ldg(const T* at) { return *at; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) { return n ? high << n | low >> (32 - n) : high; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned char bytes[8];
  std::memcpy(bytes, &a, 4);
  std::memcpy(bytes + 4, &b, 4);
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)bytes[(selector >> (4 * i)) & 7] << (8 * i);
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned high = (a >> 16) > (b >> 16) ? a : b, low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b;
  return (high & 0xFFFF0000u) | (low & 0xFFFFu);
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
template <typename T>
T min(T a, T b) { return a < b ? a : b; }

namespace quads {

inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}
inline int multiprocessors() { return 4; }
template <auto Kernel>
cudaError_t allow_shared_memory(int) { return cudaSuccess; }

template <typename T>
float to_float(T x) { return (float)x; }
template <typename T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return x;
}

template <typename... KArgs, typename... Args>
cudaError_t launch(void (*kernel)(KArgs...), dim3 grid, dim3 block, size_t smem, cudaStream_t, Args... args) {
  gridDim.x = grid.x;
  blockDim.x = block.x;
  for (unsigned b = 0; b < grid.x; ++b) {
    blockIdx.x = b;
    if (emulation::before_block != nullptr) emulation::before_block();
    emulation::dynamic_shared.assign(smem / 16 + 1, make_float4(NAN, NAN, NAN, NAN));
    emulation::block_barrier = std::make_unique<std::barrier<>>(block.x);
    emulation::warp_barriers.clear();
    for (unsigned w = 0; w < block.x / 32; ++w) emulation::warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < block.x; ++i)
      threads.emplace_back([=] {
        threadIdx.x = i;
        kernel(static_cast<KArgs>(args)...);
        emulation::warp_barriers[i / 32]->arrive_and_drop();
        emulation::block_barrier->arrive_and_drop();
      });
    for (std::thread& t : threads) t.join();
  }
  return cudaSuccess;
}

}  // namespace quads
