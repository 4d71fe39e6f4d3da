// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/common.cuh where the GEMM kernels are compiled by a host compiler: mbarriers, bulk copies and named barriers
// as functions of the host, shared memory as a buffer that addresses are offsets of. A barrier that is never reached, and
// copies that are not aligned, end the process.
#pragma once

#include "emulation.cuh"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>

namespace emulation {

constexpr int kSharedBytes = 256 * 1024;
alignas(1024) inline char shared[kSharedBytes];

[[noreturn]] inline void give_up(const char* what, uint32_t where) {
  std::fprintf(stderr, "%s at %u, thread %u of block %u\n", what, where, threadIdx.x, blockIdx.x);
  std::_Exit(3);
}

struct Barrier {
  std::mutex lock;
  std::condition_variable changed;
  unsigned phase = 0;
  int expected = 0, pending = 0;
  int64_t bytes = 0;

  void settle(uint32_t address) {
    if (pending < 0) give_up("too many arrivals", address);
    if (pending > 0 || bytes != 0) return;
    ++phase;
    pending = expected;
    changed.notify_all();
  }
  template <typename Done>
  void wait(std::unique_lock<std::mutex>& held, uint32_t address, Done done) {
    if (!changed.wait_for(held, std::chrono::seconds(60), done)) give_up("barrier never completed", address);
  }
};
inline std::map<uint32_t, Barrier> mbarriers;
inline Barrier named[16], warps[32];
inline int late = 0;  // milliseconds that the first row group takes to come out of a named barrier

// A barrier of `threads` threads.
inline void meet(Barrier& b, int threads, uint32_t name) {
  std::unique_lock<std::mutex> held(b.lock);
  const unsigned phase = b.phase;
  if (++b.pending == threads) {
    b.pending = 0;
    ++b.phase;
    b.changed.notify_all();
  } else {
    b.wait(held, name, [&] { return b.phase != phase; });
  }
}

inline void fresh_block() {
  std::memset(shared, 0x7F, sizeof shared);  // as FP16 and float32 no number
  mbarriers.clear();
}
[[maybe_unused]] inline const bool registered = (before_block = fresh_block, true);

}  // namespace emulation

#undef __align__
#define __align__(bytes)
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline void __syncwarp() { emulation::meet(emulation::warps[threadIdx.x / 32], 32, threadIdx.x / 32); }

namespace quads {

inline uint32_t smem_u32(const void* p) { return (uint32_t)(static_cast<const char*>(p) - emulation::shared); }

inline void mbar_init(uint32_t bar, uint32_t count) {
  emulation::Barrier& b = emulation::mbarriers[bar];  // by one thread, before the others look
  b.expected = b.pending = (int)count;
  b.phase = 0;
}
inline void mbar_expect_tx(uint32_t bar, uint32_t bytes) {
  emulation::Barrier& b = emulation::mbarriers.at(bar);
  std::unique_lock<std::mutex> held(b.lock);
  b.bytes += bytes;
  --b.pending;
  b.settle(bar);
}
inline void mbar_arrive(uint32_t bar) { mbar_expect_tx(bar, 0); }
inline void mbar_wait(uint32_t bar, uint32_t parity) {
  emulation::Barrier& b = emulation::mbarriers.at(bar);
  std::unique_lock<std::mutex> held(b.lock);
  b.wait(held, bar, [&] { return (b.phase & 1) != parity; });
}
inline void mbar_init_fence() {}
inline void fence_proxy_async() {}

inline void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if ((reinterpret_cast<uintptr_t>(src) | dst | bytes) % 16) emulation::give_up("bulk copy not aligned", dst);
  std::memcpy(emulation::shared + dst, src, bytes);
  emulation::Barrier& b = emulation::mbarriers.at(bar);
  std::unique_lock<std::mutex> held(b.lock);
  b.bytes -= bytes;
  b.settle(bar);
}
inline void cp_async16(uint32_t dst, const void* src) {
  if ((reinterpret_cast<uintptr_t>(src) | dst) % 16) emulation::give_up("copy not aligned", dst);
  std::memcpy(emulation::shared + dst, src, 16);
}
inline void cp_async_commit() {}
template <int N>
inline void cp_async_wait() {}

template <typename V>
inline void load_shared(uint32_t address, V& v) { std::memcpy(&v, emulation::shared + address, sizeof v); }
inline void named_barrier(int id, int threads) {
  emulation::meet(emulation::named[id], threads, id);
  if (id == 1) std::this_thread::sleep_for(std::chrono::milliseconds(emulation::late));
}

}  // namespace quads
