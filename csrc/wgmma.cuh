// SPDX-License-Identifier: Apache-2.0
// wgmma m64nNk16 with A (weights) from registers, B (tokens, K-major, 128-byte swizzle) from shared memory,
// FP16 operands, FP32 accumulators; N = 8, 16, .. 64, 80, .. 160.
#pragma once

#include <stdint.h>

namespace quads {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// A warpgroup gives registers back, or takes more.
template <int N>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Descriptor of a K-major tile: rows of 128 bytes, 16-byte chunk c of row r stored at chunk c ^ (r % 8), groups of 8 rows
// 1024 bytes apart; the tile is 1024-byte aligned. kstep: 16 k further each. The address should be the same in all threads as
// far as the compiler can see: descriptors live in uniform registers.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int kstep) {
  constexpr uint32_t high = 64u | 1u << 30;  // 1024 bytes between groups of 8 rows; 128-byte swizzle
  const uint32_t low = ((address & 0x3FFFFu) >> 4 | 1u << 16) + 2 * kstep;  // leading offset 1: unused with this swizzle
  return (uint64_t)high << 32 | low;
}

// d [N / 2 registers: 4 for every 8 tokens] += a x b.
template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);

// Accumulator registers in the text of the instruction (D_N) and as operands (O_N), 4 for every 8 of N.
#define QUADS_D4(i0, i1, i2, i3) "%" #i0 ", %" #i1 ", %" #i2 ", %" #i3
#define QUADS_O4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QUADS_D_8 QUADS_D4(0, 1, 2, 3)
#define QUADS_D_16 QUADS_D_8 ", " QUADS_D4(4, 5, 6, 7)
#define QUADS_D_24 QUADS_D_16 ", " QUADS_D4(8, 9, 10, 11)
#define QUADS_D_32 QUADS_D_24 ", " QUADS_D4(12, 13, 14, 15)
#define QUADS_D_40 QUADS_D_32 ", " QUADS_D4(16, 17, 18, 19)
#define QUADS_D_48 QUADS_D_40 ", " QUADS_D4(20, 21, 22, 23)
#define QUADS_D_56 QUADS_D_48 ", " QUADS_D4(24, 25, 26, 27)
#define QUADS_D_64 QUADS_D_56 ", " QUADS_D4(28, 29, 30, 31)
#define QUADS_D_72 QUADS_D_64 ", " QUADS_D4(32, 33, 34, 35)
#define QUADS_D_80 QUADS_D_72 ", " QUADS_D4(36, 37, 38, 39)
#define QUADS_D_88 QUADS_D_80 ", " QUADS_D4(40, 41, 42, 43)
#define QUADS_D_96 QUADS_D_88 ", " QUADS_D4(44, 45, 46, 47)
#define QUADS_D_104 QUADS_D_96 ", " QUADS_D4(48, 49, 50, 51)
#define QUADS_D_112 QUADS_D_104 ", " QUADS_D4(52, 53, 54, 55)
#define QUADS_D_120 QUADS_D_112 ", " QUADS_D4(56, 57, 58, 59)
#define QUADS_D_128 QUADS_D_120 ", " QUADS_D4(60, 61, 62, 63)
#define QUADS_D_136 QUADS_D_128 ", " QUADS_D4(64, 65, 66, 67)
#define QUADS_D_144 QUADS_D_136 ", " QUADS_D4(68, 69, 70, 71)
#define QUADS_D_152 QUADS_D_144 ", " QUADS_D4(72, 73, 74, 75)
#define QUADS_D_160 QUADS_D_152 ", " QUADS_D4(76, 77, 78, 79)
#define QUADS_O_8 QUADS_O4(0)
#define QUADS_O_16 QUADS_O_8, QUADS_O4(4)
#define QUADS_O_24 QUADS_O_16, QUADS_O4(8)
#define QUADS_O_32 QUADS_O_24, QUADS_O4(12)
#define QUADS_O_40 QUADS_O_32, QUADS_O4(16)
#define QUADS_O_48 QUADS_O_40, QUADS_O4(20)
#define QUADS_O_56 QUADS_O_48, QUADS_O4(24)
#define QUADS_O_64 QUADS_O_56, QUADS_O4(28)
#define QUADS_O_72 QUADS_O_64, QUADS_O4(32)
#define QUADS_O_80 QUADS_O_72, QUADS_O4(36)
#define QUADS_O_88 QUADS_O_80, QUADS_O4(40)
#define QUADS_O_96 QUADS_O_88, QUADS_O4(44)
#define QUADS_O_104 QUADS_O_96, QUADS_O4(48)
#define QUADS_O_112 QUADS_O_104, QUADS_O4(52)
#define QUADS_O_120 QUADS_O_112, QUADS_O4(56)
#define QUADS_O_128 QUADS_O_120, QUADS_O4(60)
#define QUADS_O_136 QUADS_O_128, QUADS_O4(64)
#define QUADS_O_144 QUADS_O_136, QUADS_O4(68)
#define QUADS_O_152 QUADS_O_144, QUADS_O4(72)
#define QUADS_O_160 QUADS_O_152, QUADS_O4(76)

// a0..a3 and b: numbers of the input operands, which follow the N / 2 accumulators.
#define QUADS_WGMMA(N, a0, a1, a2, a3, b)                                                                             \
  template <>                                                                                                         \
  __device__ __forceinline__ void wgmma<N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t descriptor) {          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" QUADS_D_##N "}, {%" #a0 ", %" #a1 ", %" #a2 \
                 ", %" #a3 "}, %" #b ", 1, 1, 1, 0;\n"                                                                \
                 : QUADS_O_##N                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));                                      \
  }
QUADS_WGMMA(8, 4, 5, 6, 7, 8)
QUADS_WGMMA(16, 8, 9, 10, 11, 12)
QUADS_WGMMA(24, 12, 13, 14, 15, 16)
QUADS_WGMMA(32, 16, 17, 18, 19, 20)
QUADS_WGMMA(40, 20, 21, 22, 23, 24)
QUADS_WGMMA(48, 24, 25, 26, 27, 28)
QUADS_WGMMA(56, 28, 29, 30, 31, 32)
QUADS_WGMMA(64, 32, 33, 34, 35, 36)
QUADS_WGMMA(80, 40, 41, 42, 43, 44)
QUADS_WGMMA(96, 48, 49, 50, 51, 52)
QUADS_WGMMA(112, 56, 57, 58, 59, 60)
QUADS_WGMMA(128, 64, 65, 66, 67, 68)
QUADS_WGMMA(144, 72, 73, 74, 75, 76)
QUADS_WGMMA(160, 80, 81, 82, 83, 84)

}  // namespace quads
