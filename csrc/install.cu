// SPDX-License-Identifier: Apache-2.0
// Weights of a refit into the prepared layout (weights.cuh), in one pass: packed ones as they are, BF16 ones quantized on the way.
// The same pass validates, adds up the digests of the packed form and writes the decode scales.
//
// A warp goes along a brick (16 rows) or a part of one, four K blocks at a time. Lane (g, t) has k-step t of every K block of rows g and g + 8,
// 16 weights each, in the packed form (8 bytes; four lanes read a sector), and byte t of all four k-steps in the prepared form; a
// 4x4 byte transpose among these four lanes, two shuffles a word, leads from one to the other. Scales are read by K block.
#include "arrange_math.cuh"
#include "common.cuh"
#include "digest_math.cuh"
#include "nvfp4_math.cuh"
#include "transpose.cuh"
#include "weights.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct InstallArgs {
  const uint8_t* source;    // codes [E, P, rows, k / 2], or BF16 weights [E, P, rows, k]
  const uint8_t* scales;    // [E, P, rows, k / 16] E4M3; null where BF16 weights are quantized
  const float* scalars;     // [E, P]: decode scales (or null); of BF16 weights their amax
  uint8_t* blocks;          // [E, row_tiles * kblocks, 2304]
  float* decode;            // [E, P] or null: decode scales are written here
  uint64_t* digests;        // [E, P] or null: digests are added here
  int* status;              // [1] or null: bits are added here
  int64_t source_stride[3]; // bytes between experts, parts, rows
  int64_t scale_stride[3];
  int64_t scalar_stride[2]; // elements between experts, parts
  int experts, rows, k;     // rows of a part
  int row_tiles, kblocks;
  int gate_up;              // 1: two parts, gate and up; 0: one
  int row_offset, k_offset; // of this shard in the whole matrix
  int count_global;         // 1: the global scale counts in this shard's digest
};

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMaxShared = 200 * 1024;
enum : int { kBadScale = 1, kBadGlobal = 2, kBadAmax = 4 };

// A value that is not to be computed again wherever it is used.
template <typename T>
__device__ __forceinline__ void keep(T& x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(x));
#endif
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int mask = 16; mask >= 1; mask >>= 1) {
    const uint32_t low = __shfl_xor_sync(0xFFFFFFFFu, (uint32_t)x, mask), high = __shfl_xor_sync(0xFFFFFFFFu, (uint32_t)(x >> 32), mask);
    x += (uint64_t)high << 32 | low;
  }
  return x;
}

// Four scales at `at`, as far as the row has them.
__device__ __forceinline__ uint32_t load_scales(const uint8_t* at, int steps) {
  uint32_t s = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < steps) s |= (uint32_t)__ldg(at + i) << 8 * i;
  return s;
}

struct Block {
  uint4 raw[2];  // 16 BF16 weights
};

__device__ __forceinline__ Block load_block(const uint8_t* at, bool inside) {
  if (!inside) return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
  return {__ldcs(reinterpret_cast<const uint4*>(at)), __ldcs(reinterpret_cast<const uint4*>(at) + 1)};
}

__device__ __forceinline__ void unpack(const Block& block, uint32_t (&pairs)[8], float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs[i] = word_of(block.raw[i / 4], i % 4);
    x[2 * i] = from_bits(pairs[i] << 16);
    x[2 * i + 1] = from_bits(pairs[i] & 0xFFFF0000u);
  }
}

// Codes of a block, and its scale's byte.
struct Quantized {
  uint2 codes;
  uint32_t scale;
};

// Any block. Rarely needed, so it is not to take room among the instructions of those that are.
__device__ __noinline__ Quantized quantize_any(Block block, RowScale scale) {
  uint32_t pairs[8], words[2];
  float x[16], q[16];
  unpack(block, pairs, x);
  const float m = amax16(x);
  const BlockScale own = quantize_block<false>(x, m, scale, q);
  block_codes(q, x, !(m > 0.0f), words);
  return {make_uint2(words[0], words[1]), own.byte};
}

// amax16 of a block.
__device__ __forceinline__ float block_amax(const uint32_t (&pairs)[8], const float (&x)[16]) {
#ifdef __CUDA_ARCH__
  __nv_bfloat162 m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]));
#pragma unroll
  for (int half = 4; half >= 1; half >>= 1)
#pragma unroll
    for (int i = 0; i < half; ++i) m[i] = __hmax2_nan(m[i], m[i + half]);
  return max_magnitude(__low2float(m[0]), __high2float(m[0]));
#else
  return amax16(x);
#endif
}

// e2m1_round of a, both times 2^-14: what FP16 holds as a code with its magnitude at bits 11..9, subnormal 0.5 included.
__device__ __forceinline__ float round_scaled(float a) {
  const float m = fmaxf(a, 1.5f / kDecodeFactor);
  const float rest = fma_rn(m, 4194304.0f, -a);
  return fma_rn(m, 4194304.0f, -rest);
}

__device__ __forceinline__ Quantized quantize_codes(const Block& block, const RowScale& scale) {
  uint32_t pairs[8];
  float x[16];
  unpack(block, pairs, x);
  const float sf = mul_rn(block_amax(pairs, x), scale.sixth);
  if (!(sf >= scale.least && sf <= 460.0f)) return quantize_any(block, scale);  // NaN and Inf too
  const BlockScale own = block_scale(sf, scale.decode);
  const float o = mul_rn(reciprocal(own.d), 1.0f / kDecodeFactor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float low = round_scaled(mul_rn(magnitude(x[2 * i]), o)), high = round_scaled(mul_rn(magnitude(x[2 * i + 1]), o));
    pairs[i] = h2_bits(__floats2half2_rn(low, high)) | (pairs[i] & 0x80008000u);
  }
  return {make_uint2(gather_four(pairs[0], pairs[1], pairs[2], pairs[3]), gather_four(pairs[4], pairs[5], pairs[6], pairs[7])), own.byte};
}

template <bool QUANTIZE, bool DIGEST>
__global__ void __launch_bounds__(kThreads, QUANTIZE ? 4 : 5) install_kernel(const InstallArgs p, int sharing) {
  extern __shared__ uint64_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, t = lane & 3;
  const int total_steps = p.k / 16, parts = p.gate_up ? 2 : 1;
  Mixed* const mixed_bytes = reinterpret_cast<Mixed*>(shared);  // [256]: scales of a stack are few different bytes
  uint64_t* const column_weights = shared + 256;                // of codes [kblocks * 8], of scales [kblocks * 4]; 0 beyond K
  const uint64_t* const scale_weights = column_weights + p.kblocks * 8;
  if constexpr (DIGEST) {
    for (int i = threadIdx.x; i < 256; i += kThreads) mixed_bytes[i] = mixed(i);
    for (int i = threadIdx.x; i < p.kblocks * 12; i += kThreads) {
      const bool code = i < p.kblocks * 8;
      const int column = code ? i : i - p.kblocks * 8;
      const bool inside = column < (code ? p.k / 8 : total_steps);
      const uint64_t weight = position_weight(column + p.k_offset / (code ? 8 : 16)) * (code ? kCodesFactor : kScalesFactor);
      column_weights[i] = inside ? weight : 0;
    }
    __syncthreads();
  }
  grid_dependency_wait();

  // Each brick is shared by `sharing` warps, which take consecutive parts of K.
  const int items = p.row_tiles * sharing, expert = blockIdx.x / items, item = blockIdx.x % items;
  const int index = item * (kWarps / sharing) + warp / sharing, tile = index / 4, brick = index % 4;
  const int length = p.kblocks / sharing, first = warp % sharing * length;
  int channel[2];  // of rows g and g + 8, in their parts; -1 for padding
  if (p.gate_up) {
    channel[0] = channel_of<kSwiGlu>(tile, brick, g);
    channel[0] = channel[1] = channel[0] < p.rows ? channel[0] : -1;
  } else {
    const int c = channel_of<kPlain>(tile, brick, g);
    channel[0] = c < p.rows ? c : -1;
    channel[1] = c + 1 < p.rows ? c + 1 : -1;
  }
  const uint8_t *row[2], *scale_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int part = r < parts ? r : 0;
    row[r] = p.source + expert * p.source_stride[0] + part * p.source_stride[1] + channel[r] * p.source_stride[2];
    scale_row[r] = p.scales + expert * p.scale_stride[0] + part * p.scale_stride[1] + channel[r] * p.scale_stride[2];
    keep(row[r]);
    keep(scale_row[r]);
  }
  const int group = tile / kGroupTiles * kGroupTiles, tiles = min(kGroupTiles, p.row_tiles - group);
  const int pitch = tiles * kBlockBytes;  // from a K block to the next
  uint8_t* block = p.blocks + ((int64_t)expert * p.row_tiles + group) * p.kblocks * kBlockBytes + (int64_t)first * pitch +
                   (tile - group) * kBlockBytes;
  const ByteTranspose transposed(t);
  const bool whole = channel[0] >= 0 && channel[1] >= 0 && p.k == p.kblocks * 64 &&
                     ((p.scale_stride[0] | p.scale_stride[1] | p.scale_stride[2] | (int64_t)p.scales) & 3) == 0;
  RowScale row_scales[2];
  if constexpr (QUANTIZE) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float amax = p.scalars[expert * p.scalar_stride[0] + (r < parts ? r : 0) * p.scalar_stride[1]];
      row_scales[r] = row_scale(encode_scale(amax, kRangeMaxToSix));
    }
  }
  const auto load = [&](int kb, uint2 (&codes)[4][2], uint32_t (&scale_bytes)[2]) {
    if (whole) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2* const at = reinterpret_cast<const uint2*>(row[r] + (kb * 4 + t) * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j][r] = __ldcs(at + 4 * j);
        scale_bytes[r] = __ldg(reinterpret_cast<const uint32_t*>(scale_row[r]) + kb + t);
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int steps = channel[r] >= 0 ? total_steps : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int step = (kb + j) * 4 + t;
        codes[j][r] = step < steps ? __ldcs(reinterpret_cast<const uint2*>(row[r] + step * 8)) : make_uint2(0, 0);
      }
      scale_bytes[r] = load_scales(scale_row[r] + (kb + t) * 4, steps - (kb + t) * 4);
    }
  };
  DigestSum sums[2];
  uint64_t zero = kMixedZero;
  keep(zero);
  int bad = 0;

  uint2 next_codes[4][2];
  uint32_t next_scales[2];
  if constexpr (!QUANTIZE) load(first, next_codes, next_scales);
  for (int kb = first; kb < first + length; kb += 4, block += 4 * pitch) {
    uint2 codes[4][2];         // of k-step t of K block kb + j
    uint32_t scale_bytes[2];   // of K block kb + t, k-step i at byte i
    if constexpr (QUANTIZE) {
      Block next[2];
      uint32_t own[2] = {0, 0};  // of k-step t of K block kb + j at byte j
#pragma unroll
      for (int j = -1; j < 4; ++j) {
        const Block now[2] = {next[0], next[1]};
        const int step = (kb + j + 1) * 4 + t;
        if (j < 3) {
#pragma unroll
          for (int r = 0; r < 2; ++r) next[r] = load_block(row[r] + step * 32, whole || (channel[r] >= 0 && step < total_steps));
        }
        if (j < 0) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Quantized q = quantize_codes(now[r], row_scales[r]);
          codes[j][r] = q.codes;
          own[r] |= q.scale << 8 * j;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) scale_bytes[r] = transposed(own[r]);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j][r] = next_codes[j][r];
        scale_bytes[r] = next_scales[r];
      }
      if (kb + 4 < first + length) load(kb + 4, next_codes, next_scales);
    }

    if (bad_scales(scale_bytes[0]) || bad_scales(scale_bytes[1])) bad = kBadScale;
    uint32_t scale_words[2];
    encode_scales_of_block(e5m3_four(scale_bytes[0]), e5m3_four(scale_bytes[1]), scale_words);
    *reinterpret_cast<uint2*>(block + t * pitch + kScaleOffset + brick * 64 + g * 8) = make_uint2(scale_words[0], scale_words[1]);
    if constexpr (DIGEST) {
      const ulonglong2* const at = reinterpret_cast<const ulonglong2*>(scale_weights + (kb + t) * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const ulonglong2 weight = at[i];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sums[r].add(mixed_bytes[scale_bytes[r] >> 16 * i & 0xFFu], weight.x);
          sums[r].add(mixed_bytes[scale_bytes[r] >> (16 * i + 8) & 0xFFu], weight.y);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (DIGEST) {
        const ulonglong2 weight = *reinterpret_cast<const ulonglong2*>(column_weights + (kb + j) * 8 + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sums[r].add(mixed((int32_t)codes[j][r].x, zero), weight.x);
          sums[r].add(mixed((int32_t)codes[j][r].y, zero), weight.y);
        }
      }
      uint32_t words[4];
      encode_four(transposed(codes[j][0].x), transposed(codes[j][1].x), transposed(codes[j][0].y), transposed(codes[j][1].y), words);
      reinterpret_cast<uint4*>(block + j * pitch + brick * 512)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  if constexpr (DIGEST) {
    uint64_t totals[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) totals[r] = channel[r] >= 0 ? sums[r].value() * position_weight(channel[r] + p.row_offset) : 0;
    if (!p.gate_up) totals[0] += totals[1];
    for (int r = 0; r < parts; ++r) {
      const uint64_t sum = warp_sum(r == 0 ? totals[0] : totals[1]);
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.digests + expert * parts + r), (unsigned long long)sum);
    }
  }
  if (item == 0 && (int)threadIdx.x < parts && p.scalars != nullptr) {
    const int part = threadIdx.x;
    float scale = p.scalars[expert * p.scalar_stride[0] + part * p.scalar_stride[1]];
    if constexpr (QUANTIZE) {
      if (!is_finite(scale)) bad |= kBadAmax;
      scale = div_rn(1.0f, encode_scale(scale, kRangeMaxToSix));
    }
    if (!(is_finite(scale) && scale > 0.0f)) bad |= kBadGlobal;
    if (p.decode != nullptr) p.decode[expert * parts + part] = scale;
    if (DIGEST && p.count_global)
      atomicAdd(reinterpret_cast<unsigned long long*>(p.digests + expert * parts + part), (unsigned long long)digest_of_scalar(bits(scale)));
  }
  if (bad != 0 && p.status != nullptr) atomicOr(p.status, bad);
}

template <bool QUANTIZE, bool DIGEST>
cudaError_t install(const InstallArgs& p, cudaStream_t stream) {
  const int quads = p.kblocks / 4, sharing = quads % 4 == 0 && quads >= 12 ? 4 : quads % 2 == 0 && quads >= 6 ? 2 : 1;
  const size_t shared = DIGEST ? ((size_t)p.kblocks * 12 + 256) * sizeof(uint64_t) : 0;
  if (shared > kMaxShared) return cudaErrorInvalidValue;
  const cudaError_t e = allow_shared_memory<install_kernel<QUANTIZE, DIGEST>>(DIGEST ? kMaxShared : 0);
  if (e != cudaSuccess) return e;
  const dim3 grid((unsigned)(p.experts * p.row_tiles * sharing));
  return launch(install_kernel<QUANTIZE, DIGEST>, grid, dim3(kThreads), shared, stream, p, sharing);
}

}  // namespace
}  // namespace quads

// Every byte of `blocks` is written. Strides and addresses: of codes multiples of 8 bytes, of BF16 weights of 16.
extern "C" int quads_install(const quads::InstallArgs* p, int quantize, void* stream) {
  using namespace quads;
  if (p->experts == 0) return 0;
  const int64_t align = quantize ? 16 : 8;
  if (p->k % 16 != 0 || p->kblocks % 4 != 0 || p->kblocks * 64 < p->k || p->row_tiles % 2 != 0 ||
      p->row_tiles * 64 < p->rows * (p->gate_up ? 2 : 1) ||
      ((p->source_stride[0] | p->source_stride[1] | p->source_stride[2] | (int64_t)p->source) & (align - 1)) != 0)
    return cudaErrorInvalidValue;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (quantize) return p->digests ? install<true, true>(*p, s) : install<true, false>(*p, s);
  return p->digests ? install<false, true>(*p, s) : install<false, false>(*p, s);
}
