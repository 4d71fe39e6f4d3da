// SPDX-License-Identifier: Apache-2.0
// The prepared weight layout, and its decoding in registers.
//
// A matrix [N, K] is cut into 64x64 blocks of 2304 bytes. Four row tiles of 64 (two at the end) form a group, and a group is one
// contiguous run [K / 64][row tiles of the group] of blocks, so that what a kernel needs next is always one copy. A block:
//
//   bytes    0..2047  codes:  4 bricks (16 rows x 64 k) of 512 bytes; lane l of a warp owns bytes 16 l .. 16 l + 15,
//                     four 32-bit words, one per k-step of 16: its A fragment of mma.m16n8k16 (and of wgmma m64k16)
//   bytes 2048..2303  scales: 4 bricks of 64 bytes; rows g and g + 8 share the 8 bytes at 8 g, two 32-bit words for
//                     k-steps (0, 1) and (2, 3)
//
// A word holds 8 E2M1 codes: fragment register a0 = (row g, k 2t, 2t+1), a1 = (g+8, same k), a2 = (g, k+8), a3 = (g+8, k+8),
// with g = lane / 4, t = lane % 4; the even k in the low 16-bit half. An E2M1 code with its sign at bit 15 and its magnitude at
// bits 11..9, read as FP16, is the value times 2^-14, subnormal 0.5 included; the block scale is multiplied in
// exactly (every product is a multiple of 2^-24), and 2^14 goes into the global scale.
//
// Four such patterns do not tile 16 bits, so a register that is cut out with one AND cannot hold bits of its own only. But the
// bits are ours to choose at load: the word w is stored such that, with M = 0x8E008E00,
//
//     a0 = (w ^ w >> 3) & M     a1 = (w ^ w << 2) & M     a2 = (w << 6) & M     a3 = (w << 9) & M
//
// which is one three-input logic operation (LOP3) a register. The map from w to the four registers is linear over GF(2) and
// invertible; vllm_quads/kernels/layout.py solves it.
//
// A scale is kept as the upper 8 bits of its FP16 form without the sign (5 exponent and 3 mantissa bits: every E4M3
// value is a normal number there). Word i holds four: k-step 2i at bits 14..7 (row g) and 30..23 (row g+8); k-step 2i+1 at
// the same places of the word rotated left by 8.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

namespace quads {

constexpr int kBlockBytes = 2304;   // one 64x64 block
constexpr int kGroupTiles = 4;      // row tiles of 64 in a group
constexpr int kScaleOffset = 2048;  // of the scales within a block
constexpr float kDecodeFactor = 16384.0f;  // 2^14

__device__ __forceinline__ uint32_t h2_bits(__half2 h) { return *reinterpret_cast<uint32_t*>(&h); }
__device__ __forceinline__ __half2 h2_from(uint32_t u) { return *reinterpret_cast<__half2*>(&u); }

// Two FP16 scales (row g, row g + 8) of one k-step.
template <int KSTEP>
__device__ __forceinline__ __half2 decode_scales(uint2 words) {
  uint32_t w = KSTEP < 2 ? words.x : words.y;
  if (KSTEP & 1) w = __funnelshift_l(w, w, 8);
  return h2_from(w & 0x7F807F80u);
}

// Left shifts as multiplications: they run on the FMA pipe, which has time, and not on the ALU pipe, which has none. A kernel
// argument, because the compiler would turn known factors back into shifts.
struct Shifts {
  uint32_t by2 = 4, by6 = 64, by9 = 512;
};

// One word of codes and its two scales to an A fragment (times 2^-14).
__device__ __forceinline__ void decode_word(uint32_t w, __half2 scales, const Shifts& shift, uint32_t (&a)[4]) {
  constexpr uint32_t M = 0x8E008E00u;
  const uint32_t a0 = (w ^ (w >> 3)) & M;
  const uint32_t a1 = (w ^ (w * shift.by2)) & M;
  const uint32_t a2 = (w * shift.by6) & M;
  const uint32_t a3 = (w * shift.by9) & M;
  const __half2 lo = __low2half2(scales), hi = __high2half2(scales);
  a[0] = h2_bits(__hmul2(h2_from(a0), lo));
  a[1] = h2_bits(__hmul2(h2_from(a1), hi));
  a[2] = h2_bits(__hmul2(h2_from(a2), lo));
  a[3] = h2_bits(__hmul2(h2_from(a3), hi));
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// SwiGLU: row g of a brick is a channel of gate, row g + 8 the same channel of up; one output channel.
// Plain:  rows g and g + 8 are two adjacent output channels.
enum : int { kSwiGlu = 0, kPlain = 1 };

// First output channel of row g of a brick. Two adjacent row tiles interleave their channels, so that a thread that owns the same
// row of both writes adjacent channels (layout.py: gate_up_order, pair_order).
template <int EPILOGUE>
__device__ __forceinline__ int channel_of(int row_tile, int brick, int g) {
  const int pair = row_tile >> 1, odd = row_tile & 1;
  return EPILOGUE == kSwiGlu ? pair * 64 + brick * 16 + 2 * g + odd : pair * 128 + brick * 32 + 4 * g + 2 * odd;
}

}  // namespace quads
