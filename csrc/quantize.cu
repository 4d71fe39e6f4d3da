// SPDX-License-Identifier: Apache-2.0
// Online activation quantization with residual, bit-identical to vllm_quads.nvfp4.reference / vllm_quads.compensation,
// and the small kernels around the MoE GEMMs: grouping of (token, expert) pairs and the top-k sum.
//
// Quantization: a thread works on whole 16-channel blocks, a power-of-two group of threads on a row; the row's amax (per-token
// global scale) is one reduction, for which the blocks wait in registers (few rows) or in shared memory (many).
#include <type_traits>

#include "common.cuh"
#include "nvfp4_math.cuh"
#include "sum.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct QuantizeArgs {
  const void* x;              // [rows, ldx] bfloat16 or float16
  const float* center;        // [K] or null; by_chunk: [4][K / 16][4], the first four channels of every block, then the next
  const float* g;             // static encode global scales [groups] or null (one per row, from its amax)
  const uint8_t* mask;        // [groups, K / 16] or null: blocks whose residual is added / null
  const uint8_t* full;        // [rows / full_divisor] or null: rows that take the residual of every block
  const int* group;           // [rows] or null: row's group (expert) for g and mask; negative rows are skipped
  __half* merged;             // [rows, ldm]: q s + residual, zero in [K, ldm)
  float* decode;              // [rows]
  uint8_t* codes;             // packed form: [rows, (K + S) / 2]
  uint8_t* scales;            // packed form: [rows, (K + S) / 16] linear, or 128x4 swizzled
  const int* appended;        // [S / 16] block indices, ascending
  int rows, k, ldx, ldm;
  int full_divisor;           // row / full_divisor indexes `full`
  int full_all;               // every row takes the residual of every block
  int num_appended;           // S / 16
  int swizzled;
  int by_chunk;               // the order of `center`
  int early;                  // the predecessor has waited for what wrote group, mask and full: they may be read before it is waited for
};

// Mirrored in vllm_quads/kernels/_native.py.
struct AlignArgs {
  const int* ids;          // [pairs * id_stride] expert ids (id_stride 2 reads the low words of int64)
  const int* expert_map;   // [global experts] or null: local expert or -1
  int* pair_expert;        // [pairs]: local expert or -1
  int* sorted;             // [pairs]
  int* segments;           // [max segments][3]: expert, first entry of `sorted`, count
  int* num_segments;       // [2]: segments, and pairs in them
  int* rank;               // [pairs]: scratch, only with several blocks
  int* histogram;          // [blocks][local experts]: scratch, only with several blocks
  int pairs, id_stride, global_experts, local_experts, capacity, blocks;
};

namespace {

constexpr int kThreads = 256;
constexpr int kMaxExperts = 1024;
constexpr int kRegisters = 80;  // of a thread: 24 warps a multiprocessor
constexpr int kMostShared = 220 * 1024;

// 16 channels as they are in memory, and as float32 after centring.
struct RawBlock {
  uint4 v[2];
};

template <typename T>
__device__ __forceinline__ RawBlock load_raw(const T* p) {
  return {reinterpret_cast<const uint4*>(p)[0], reinterpret_cast<const uint4*>(p)[1]};
}

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t w);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t w) {
  return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t w) {
  return __half22float2(*reinterpret_cast<const __half2*>(&w));
}

template <typename T>
__device__ __forceinline__ void unpack_block(const RawBlock& raw, float (&x)[16]) {
  const uint32_t words[8] = {raw.v[0].x, raw.v[0].y, raw.v[0].z, raw.v[0].w, raw.v[1].x, raw.v[1].y, raw.v[1].z, raw.v[1].w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 v = unpack2<T>(words[i]);
    x[2 * i] = v.x;
    x[2 * i + 1] = v.y;
  }
}

// Or the compiler unpacks again wherever it needs a value.
__device__ __forceinline__ void keep(float (&x)[16]) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int i = 0; i < 16; ++i) asm("" : "+f"(x[i]));
#endif
}

// The centre of a row's blocks, in either order: a warp reads `by_chunk` in whole lines.
struct Center {
  const float4* first;  // of the thread's first block, null: not centred
  int block, chunk;     // steps in vectors of four channels
  __device__ __forceinline__ Center(const QuantizeArgs& p, int lane) {
    block = p.by_chunk ? 1 : 4;
    chunk = p.by_chunk ? (unsigned)p.k / 16u : 1;
    first = p.center == nullptr ? nullptr : reinterpret_cast<const float4*>(p.center) + lane * block;
  }
  // b: blocks behind the first one
  __device__ __forceinline__ void subtract(int b, float (&x)[16]) const {
    const float4* c = first + b * block;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = c[i * chunk];
      x[4 * i] = sub_rn(x[4 * i], v.x);
      x[4 * i + 1] = sub_rn(x[4 * i + 1], v.y);
      x[4 * i + 2] = sub_rn(x[4 * i + 2], v.z);
      x[4 * i + 3] = sub_rn(x[4 * i + 3], v.w);
    }
  }
};

// max |x| of a block as it is in memory: as bit patterns of 16 bits, in which order magnitudes are (NaN last).
template <typename T>
__device__ __forceinline__ float raw_amax(const RawBlock& raw) {
  const uint32_t words[8] = {raw.v[0].x, raw.v[0].y, raw.v[0].z, raw.v[0].w, raw.v[1].x, raw.v[1].y, raw.v[1].z, raw.v[1].w};
  uint32_t m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = words[i] & 0x7FFF7FFFu;
#pragma unroll
  for (int half = 4; half >= 1; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) m[i] = __vmaxu2(m[i], m[i + half]);
  const float2 both = unpack2<T>(m[0]);
  return max_magnitude(both.x, both.y);
}

__device__ __forceinline__ int64_t scale_offset(int row, int column, int columns, int swizzled) {
  if (!swizzled) return (int64_t)row * columns + column;
  const int column_tiles = (columns + 3) / 4;
  return ((int64_t)(row / 128) * column_tiles + column / 4) * 512 + (row % 32) * 16 + (row / 32) % 4 * 4 + column % 4;
}

// Shared memory of a row in `quantize_staged_kernel`, in vectors of 16 bytes.
template <bool CENTERED, int TPR>
__host__ __device__ __forceinline__ int staged_vectors(int blocks) {
  return (blocks + TPR - 1) / TPR * TPR * (CENTERED ? 4 : 2) + (blocks + TPR - 1) / TPR * TPR / 4;
}

// max over a row's TPR threads; TPR > 32 goes through shared memory.
template <int THREADS, int TPR>
__device__ __forceinline__ float row_max(float m) {
#pragma unroll
  for (int offset = (TPR < 32 ? TPR : 32) / 2; offset > 0; offset /= 2)
    m = max_magnitude(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
  if (TPR > 32) {
    __shared__ float partial[THREADS / 32];
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
    __syncthreads();
    const int first = TPR == THREADS ? 0 : threadIdx.x / TPR * (TPR / 32);
#pragma unroll
    for (int i = 0; i < TPR / 32; ++i) m = max_magnitude(m, partial[first + i]);
  }
  return m;
}

// Signs of two floats, as those of two 16-bit numbers.
__device__ __forceinline__ uint32_t two_signs(float a, float b) {
  return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
}
__device__ __forceinline__ void signs_of(const float (&x)[16], uint32_t (&signs)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) signs[j] = two_signs(x[2 * j], x[2 * j + 1]);
}

// 16 values in FP16, with the signs that are bits 15 and 31 of `signs`.
__device__ __forceinline__ void store16(__half* target, const float (&v)[16], const uint32_t (&signs)[8]) {
  uint32_t out[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const __half2 h = __floats2half2_rn(v[2 * j], v[2 * j + 1]);
    out[j] = *reinterpret_cast<const uint32_t*>(&h) ^ (signs[j] & 0x80008000u);
  }
  reinterpret_cast<uint4*>(target)[0] = make_uint4(out[0], out[1], out[2], out[3]);
  reinterpret_cast<uint4*>(target)[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

// Merged form of a block x with amax m; signs: those of x.
template <bool FOUR>
__device__ __forceinline__ void write_merged(__half* target, const RowScale& row, bool with_residual, const float (&x)[16], float m,
                                             const uint32_t (&signs)[8]) {
  float q[16], v[16];
  const BlockScale s = quantize_block<FOUR>(x, m, row, q);
  if (with_residual) {
    float r[16], qr[16];
    residual_block(x, q, s.s, row.decode, v, r);
    const float sr = quantize_residual(r, row, qr).s;
    // q s is exact, and so is its sum with qr sr: one rounding, to FP16
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = fma_rn(qr[j], sr, v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = mul_rn(q[j], s.s);
  }
  store16(target, v, signs);
}
template <bool FOUR>
__device__ __forceinline__ void write_merged(__half* target, const RowScale& row, bool with_residual, const float (&x)[16], float m) {
  uint32_t signs[8];
  signs_of(x, signs);
  write_merged<FOUR>(target, row, with_residual, x, m, signs);
}

// Packed form: block i of a row, made from x (with amax m) or, behind the input's blocks, from its residual.
template <bool FOUR>
__device__ __forceinline__ void write_packed(const QuantizeArgs& p, const RowScale& row, int index, int i, const float (&x)[16], float m) {
  const int blocks = p.k / 16, total = blocks + p.num_appended;
  float q[16];
  const BlockScale s = quantize_block<FOUR>(x, m, row, q);
  uint32_t words[2], byte = s.byte;
  if (i >= blocks) {
    float v[16], r[16], qr[16];
    residual_block(x, q, s.s, row.decode, v, r);
    byte = quantize_residual(r, row, qr).byte;
    residual_codes(qr, r, x, qr[0] != qr[0], words);
  } else {
    block_codes(q, x, m == 0.0f || q[0] != q[0], words);
  }
  *reinterpret_cast<uint2*>(p.codes + ((int64_t)index * total + i) * 8) = make_uint2(words[0], words[1]);
  p.scales[scale_offset(index, i, total, p.swizzled)] = (uint8_t)byte;
}

// Rows first_row .. first_row + THREADS / TPR - 1. A thread keeps HOLD blocks of 16 channels in registers between the row's amax
// and its quantization; with HOLD = 0 they are read again, from the L1 cache mostly. WAIT: the predecessor is still to be waited for.
template <typename T, bool FOUR, bool PACKED, int THREADS, int TPR, int HOLD, bool WAIT>
__device__ __forceinline__ void quantize_rows(const QuantizeArgs& p, int first_row) {
  constexpr int KEPT = HOLD > 0 ? HOLD : 1;
  const int lane = TPR == THREADS ? threadIdx.x : threadIdx.x % TPR;
  const int index = TPR == THREADS ? first_row : first_row + threadIdx.x / TPR;
  const int blocks = (unsigned)p.k / 16u;
  const bool inside = TPR == THREADS || index < p.rows;
  const T* x = static_cast<const T*>(p.x) + (int64_t)index * p.ldx + 16 * lane;
  RawBlock raw[KEPT];
  const auto read = [&] {
    if (HOLD > 0 && inside) {
#pragma unroll
      for (int j = 0; j < KEPT; ++j)
        if (lane + j * TPR < blocks) raw[j] = load_raw<T>(x + j * TPR * 16);
    }
  };
  int group = -1;
  bool full = p.full_all, chosen[KEPT];
  const uint8_t* mask = nullptr;
  // All that takes a look at the row's group, which is waited for. Loads are volatile: before grid_dependency_wait nothing says
  // that the first-level cache has let go of what these addresses held before.
  const auto select = [&] {
    if (inside) group = p.group != nullptr ? *(volatile const int*)(p.group + index) : 0;
    if (group >= 0 && p.full != nullptr) full |= *(volatile const uint8_t*)(p.full + index / p.full_divisor) != 0;
    if (!PACKED && !full && p.mask != nullptr) mask = p.mask + (int64_t)group * blocks + lane;
#pragma unroll
    for (int j = 0; HOLD > 0 && j < KEPT; ++j)
      chosen[j] = full || (mask != nullptr && group >= 0 && lane + j * TPR < blocks && mask[j * TPR] != 0);
  };
  if (WAIT && p.early) {
    select();
    grid_dependency_wait();
    read();
  } else {
    if (WAIT) grid_dependency_wait();
    read();
    select();
  }
  const bool active = group >= 0, centered = p.center != nullptr;
  const Center center(p, lane);

  float v[KEPT][16], own[KEPT];
  float m = 0.0f;
  if (active) {
    if (HOLD > 0) {
#pragma unroll
      for (int j = 0; j < KEPT; ++j)
        if (lane + j * TPR < blocks) {
          unpack_block<T>(raw[j], v[j]);
          if (centered) center.subtract(j * TPR, v[j]);
          own[j] = amax16(v[j]);
          m = max_magnitude(m, own[j]);
        }
    } else if (p.g == nullptr) {
#pragma unroll 4
      for (int b = lane; b < blocks; b += TPR) {
        unpack_block<T>(load_raw<T>(x + 16 * (b - lane)), v[0]);
        if (centered) center.subtract(b - lane, v[0]);
        m = max_magnitude(m, amax16(v[0]));
      }
    }
  }
  if (p.g == nullptr) m = row_max<THREADS, TPR>(m);
  if (!active) return;
  const RowScale row = row_scale(p.g != nullptr ? p.g[group] : encode_scale(m, FOUR ? kRangeFourOverSix : kRangeMaxToSix));
  if (lane == 0) p.decode[index] = row.decode;

  __half* merged = p.merged + (int64_t)index * p.ldm + 16 * lane;
  if (HOLD > 0) {
#pragma unroll
    for (int j = 0; j < KEPT; ++j)
      if (lane + j * TPR < blocks) {
        if (PACKED)
          write_packed<FOUR>(p, row, index, lane + j * TPR, v[j], own[j]);
        else
          write_merged<FOUR>(merged + j * TPR * 16, row, chosen[j], v[j], own[j]);
      }
  }
  // blocks that are not held, appended blocks
  if (HOLD == 0 || PACKED) {
#pragma unroll 1
    for (int i = HOLD > 0 ? blocks + lane : lane; i < (PACKED ? blocks + p.num_appended : blocks); i += TPR) {
      const int b = (PACKED && i >= blocks ? p.appended[i - blocks] : i) - lane;
      unpack_block<T>(load_raw<T>(x + 16 * b), v[0]);
      if (centered) center.subtract(b, v[0]);
      if (PACKED)
        write_packed<FOUR>(p, row, index, i, v[0], amax16(v[0]));
      else
        write_merged<FOUR>(merged + 16 * b, row, full || (mask != nullptr && mask[b] != 0), v[0], amax16(v[0]));
    }
  }
  if (!PACKED && p.ldm != p.k)  // padding
    for (int b = blocks + lane; b < p.ldm / 16; b += TPR) {
      uint4* out = reinterpret_cast<uint4*>(merged + 16 * (b - lane));
      out[0] = out[1] = make_uint4(0, 0, 0, 0);
    }
}

// REGISTERS: what a thread may have.
template <typename T, bool FOUR, bool PACKED, int THREADS, int TPR, int HOLD, int REGISTERS>
__global__ void __launch_bounds__(THREADS, 65536 / REGISTERS / THREADS) quantize_kernel(const QuantizeArgs p) {
  grid_dependency_launch();
  quantize_rows<T, FOUR, PACKED, THREADS, TPR, HOLD, true>(p, blockIdx.x * (THREADS / TPR));
}

// Many rows, merged form: the same in fewer instructions. A thread takes several blocks of a row, and what it has read waits in
// shared memory for the row's amax, centred in FP32 or else as it is: for each of the thread's blocks its vectors, then its amax.
// No thread reads what another has written. Only the loop's body is unrolled, or the instruction cache would be too small.
template <typename T, bool FOUR, bool CENTERED, int THREADS, int TPR, int REGISTERS>
__global__ void __launch_bounds__(THREADS, 65536 / REGISTERS / THREADS) quantize_staged_kernel(const QuantizeArgs p) {
  constexpr int V = CENTERED ? 4 : 2;
  constexpr int AHEAD = CENTERED ? 2 : 4;  // loads in flight, in blocks
  grid_dependency_launch();
  grid_dependency_wait();
  extern __shared__ float4 staged[];
  const int lane = TPR == THREADS ? threadIdx.x : threadIdx.x % TPR;
  const int slot = TPR == THREADS ? 0 : threadIdx.x / TPR;
  const int index = blockIdx.x * (THREADS / TPR) + slot;
  const int blocks = (unsigned)p.k / 16u;
  const int group = index >= p.rows ? -1 : p.group != nullptr ? p.group[index] : 0;
  const bool active = group >= 0;
  float4* const vectors = staged + slot * staged_vectors<CENTERED, TPR>(blocks) + lane;
  float* const amaxes = reinterpret_cast<float*>(vectors - lane + (blocks + TPR - 1) / TPR * TPR * V) + lane;

  float m = 0.0f;
  if (active) {
    const T* x = static_cast<const T*>(p.x) + (int64_t)index * p.ldx + 16 * lane;
    const int step = p.by_chunk ? 1 : 4, chunk = p.by_chunk ? blocks : 1;
    const float4* c[4];
    if (CENTERED)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = reinterpret_cast<const float4*>(p.center) + lane * step + i * chunk;
    float4* to = vectors;
    float* to_amax = amaxes;
#pragma unroll 1
    for (int left = blocks - lane; left > 0; left -= AHEAD * TPR) {
      RawBlock raw[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (j * TPR < left) raw[j] = load_raw<T>(x + j * TPR * 16);
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (j * TPR >= left) break;
        float own;
        if constexpr (CENTERED) {
          float v[16];
          unpack_block<T>(raw[j], v);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float4 f = c[i][j * TPR * step];
            v[4 * i] = sub_rn(v[4 * i], f.x), v[4 * i + 1] = sub_rn(v[4 * i + 1], f.y);
            v[4 * i + 2] = sub_rn(v[4 * i + 2], f.z), v[4 * i + 3] = sub_rn(v[4 * i + 3], f.w);
            to[(V * j + i) * TPR] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
          }
          own = amax16(v);
        } else {
          own = raw_amax<T>(raw[j]);
#pragma unroll
          for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(to + (V * j + i) * TPR) = raw[j].v[i];
        }
        m = max_magnitude(m, own);
        to_amax[j * TPR] = own;
      }
      x += AHEAD * TPR * 16;
      to += AHEAD * V * TPR;
      to_amax += AHEAD * TPR;
      if (CENTERED)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] += AHEAD * TPR * step;
    }
  }
  if (p.g == nullptr) m = row_max<THREADS, TPR>(m);
  if (!active) return;
  const RowScale row = row_scale(p.g != nullptr ? p.g[group] : encode_scale(m, FOUR ? kRangeFourOverSix : kRangeMaxToSix));
  if (lane == 0) p.decode[index] = row.decode;
  __half* merged = p.merged + (int64_t)index * p.ldm + 16 * lane;
  bool full = p.full_all;
  if (p.full != nullptr) full |= p.full[index / p.full_divisor] != 0;
  const uint8_t* mask = !full && p.mask != nullptr ? p.mask + (int64_t)group * blocks + lane : nullptr;
  const float4* from = vectors;
  const float* from_amax = amaxes;
  int left = blocks - lane;
#pragma unroll 1
  for (; left > 0; left -= TPR) {
    bool with_residual = full;
    if (mask != nullptr) {
      with_residual = *mask != 0;
      mask += TPR;
    }
    float v[16];
    uint32_t signs[8];
    if constexpr (CENTERED) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 four = from[i * TPR];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
      }
      write_merged<FOUR>(merged, row, with_residual, v, *from_amax);
    } else {
      RawBlock raw;
#pragma unroll
      for (int i = 0; i < 2; ++i) raw.v[i] = *reinterpret_cast<const uint4*>(from + i * TPR);
      unpack_block<T>(raw, v);
      keep(v);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        signs[4 * i] = raw.v[i].x, signs[4 * i + 1] = raw.v[i].y, signs[4 * i + 2] = raw.v[i].z, signs[4 * i + 3] = raw.v[i].w;
      write_merged<FOUR>(merged, row, with_residual, v, *from_amax, signs);
    }
    merged += 16 * TPR;
    from += V * TPR;
    from_amax += TPR;
  }
  if (p.ldm != p.k)  // padding; the thread's next block is the first behind the row's
#pragma unroll 1
    for (int rest = left + (p.ldm - p.k) / 16; rest > 0; rest -= TPR) {
      uint4* out = reinterpret_cast<uint4*>(merged);
      out[0] = out[1] = make_uint4(0, 0, 0, 0);
      merged += 16 * TPR;
    }
}

// Grouping: pairs by local expert, each expert's list cut into equal segments of at most `capacity`. The order of pairs within an
// expert depends on the run; no result does, since a pair's arithmetic does not depend on its place in a segment.

constexpr int kPairsPerBlock = 2048;

// Local experts of this thread's pairs base + j * THREADS (all loads in flight at once), written to pair_expert.
template <int THREADS>
__device__ __forceinline__ void load_experts(const AlignArgs& p, int base, int (&e)[kPairsPerBlock / THREADS]) {
#pragma unroll
  for (int j = 0; j < kPairsPerBlock / THREADS; ++j) {
    const int i = base + j * THREADS;
    e[j] = i < p.pairs ? p.ids[(int64_t)i * p.id_stride] : -1;
    if (e[j] >= p.global_experts) e[j] = -1;
  }
  if (p.expert_map != nullptr) {
#pragma unroll
    for (int j = 0; j < kPairsPerBlock / THREADS; ++j) e[j] = e[j] < 0 ? -1 : p.expert_map[e[j]];
  }
#pragma unroll
  for (int j = 0; j < kPairsPerBlock / THREADS; ++j) {
    const int i = base + j * THREADS;
    if (e[j] < 0 || e[j] >= p.local_experts) e[j] = -1;
    if (i < p.pairs) p.pair_expert[i] = e[j];
  }
}

// From this capacity on segments differ enough in their time for their order to matter; below, it would only cost time.
constexpr int kOrderedCapacity = 40;

// The segments of expert e, equal parts so that no part runs nearly empty, from place `at` of the list on.
__device__ __forceinline__ void write_segments(const AlignArgs& p, int e, int start, int count, int parts, int at) {
  for (int i = 0; i < parts; ++i) {
    int* segment = p.segments + 3 * (at + i);
    const int begin = (int)((int64_t)count * i / parts), end = (int)((int64_t)count * (i + 1) / parts);
    segment[0] = e;
    segment[1] = start + begin;
    segment[2] = end - begin;
  }
}

// start[e] = first entry of expert e, from its count; in one block (`write`) also the segments.
template <int THREADS>
__device__ __forceinline__ void scan_experts(const AlignArgs& p, const int* count, int* start, bool write) {
  __shared__ __align__(16) uint32_t key[kMaxExperts];  // tokens of an expert's largest segment, number of segments
  const bool ordered = p.capacity >= kOrderedCapacity;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int pairs = 0, segments = 0;
    for (int base = 0; base < p.local_experts; base += 32) {
      const int e = base + lane;
      const int c = e < p.local_experts ? count[e] : 0;
      const int s = (c + p.capacity - 1) / p.capacity;
      int pair_sum = c, segment_sum = s;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int a = __shfl_up_sync(0xFFFFFFFFu, pair_sum, offset), b = __shfl_up_sync(0xFFFFFFFFu, segment_sum, offset);
        if (lane >= offset) pair_sum += a, segment_sum += b;
      }
      if (ordered) key[e] = c == 0 ? 0 : (uint32_t)((c + s - 1) / s) << 16 | s;
      if (e < p.local_experts) {
        start[e] = pairs + pair_sum - c;
        if (write && !ordered) write_segments(p, e, start[e], c, s, segments + segment_sum - s);
      }
      pairs += __shfl_sync(0xFFFFFFFFu, pair_sum, 31);
      segments += __shfl_sync(0xFFFFFFFFu, segment_sum, 31);
    }
    if (write && lane == 0) p.num_segments[0] = segments, p.num_segments[1] = pairs;
  }
  __syncthreads();
  if (!write || !ordered) return;
  // Large segments first, so that the GEMM can give every block about as much (Units in moe_wgmma.cuh).
  for (int e = threadIdx.x; e < p.local_experts; e += THREADS) {
    const uint32_t mine = key[e];
    int at = 0;
    for (int f = 0; f < p.local_experts; f += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(key + f);
      const uint32_t keys[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (keys[i] >= (mine & 0xFFFF0000u) + (f + i < e ? 0u : 0x10000u)) at += keys[i] & 0xFFFFu;
    }
    write_segments(p, e, start[e], count[e], mine & 0xFFFFu, at);
  }
}

// All of it in one block, for up to kPairsPerBlock pairs; with more, the first of two passes: experts, ranks, histograms.
template <int THREADS>
__device__ __forceinline__ void align_pairs(const AlignArgs& p) {
  constexpr int kBatch = kPairsPerBlock / THREADS;  // of one thread
  __shared__ int count[kMaxExperts];
  __shared__ int start[kMaxExperts];
  for (int e = threadIdx.x; e < p.local_experts; e += THREADS) count[e] = 0;
  int e[kBatch], rank[kBatch];
  const int base = blockIdx.x * kPairsPerBlock + threadIdx.x;
  load_experts<THREADS>(p, base, e);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kBatch; ++j) rank[j] = e[j] >= 0 ? atomicAdd(&count[e[j]], 1) : 0;
  __syncthreads();
  if (p.blocks > 1) {
    for (int i = threadIdx.x; i < p.local_experts; i += THREADS) p.histogram[blockIdx.x * p.local_experts + i] = count[i];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (e[j] >= 0) p.rank[base + j * THREADS] = rank[j];
    return;
  }
  scan_experts<THREADS>(p, count, start, true);
#pragma unroll
  for (int j = 0; j < kBatch; ++j)
    if (e[j] >= 0) p.sorted[start[e[j]] + rank[j]] = base + j * THREADS;
}

// Second pass with several blocks.
__global__ void __launch_bounds__(kThreads) scatter_kernel(const AlignArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  __shared__ int count[kMaxExperts], before[kMaxExperts], start[kMaxExperts];
  for (int e = threadIdx.x; e < p.local_experts; e += kThreads) {
    int total = 0, mine = 0;
#pragma unroll 8
    for (int b = 0; b < p.blocks; ++b) {
      const int c = p.histogram[b * p.local_experts + e];
      if (b < (int)blockIdx.x) mine += c;
      total += c;
    }
    count[e] = total;
    before[e] = mine;
  }
  __syncthreads();
  scan_experts<kThreads>(p, count, start, blockIdx.x == 0);
#pragma unroll
  for (int j = 0; j < kPairsPerBlock / kThreads; ++j) {
    const int i = blockIdx.x * kPairsPerBlock + threadIdx.x + j * kThreads;
    if (i >= p.pairs) break;
    const int e = p.pair_expert[i];
    if (e >= 0) p.sorted[start[e] + before[e] + p.rank[i]] = i;
  }
}

// Grouping (the first blocks) and quantization of the layer's input (the others) in one launch.
template <typename T, bool FOUR, int THREADS, int TPR, int HOLD, int REGISTERS>
__global__ void __launch_bounds__(THREADS, 65536 / REGISTERS / THREADS) prologue_kernel(const AlignArgs a, const QuantizeArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if ((int)blockIdx.x < a.blocks)
    align_pairs<THREADS>(a);
  else
    quantize_rows<T, FOUR, false, THREADS, TPR, HOLD, false>(p, (blockIdx.x - a.blocks) * (THREADS / TPR));
}

template <typename In, typename Out, bool SPLIT>
__global__ void __launch_bounds__(kThreads) sum_kernel(const SumArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  sum_pairs<In, Out, SPLIT, kThreads>(p, blockIdx.x, gridDim.x);
}

// Calls f<TPR, HOLD>(): as many threads as a row has blocks, if there are no more than 512. COARSE: fewer kernels to compile.
template <bool COARSE, typename F>
int for_row(int k, F f) {
  const int blocks = k / 16;
  if constexpr (!COARSE) {
    if (blocks <= 16) return f.template operator()<16, 1>();
    if (blocks <= 256 && blocks > 128) return f.template operator()<256, 1>();
    if (blocks <= 512 && blocks > 256) return f.template operator()<512, 1>();
  }
  if (blocks <= 32) return f.template operator()<32, 1>();
  if (blocks <= 64) return f.template operator()<64, 1>();
  if (blocks <= 128) return f.template operator()<128, 1>();
  return f.template operator()<256, 0>();
}

template <typename T, bool FOUR, bool PACKED, int THREADS, int TPR, int HOLD, int REGISTERS>
int launch_rows(const QuantizeArgs& p, cudaStream_t s) {
  constexpr int rows = THREADS / TPR;
  return launch(quantize_kernel<T, FOUR, PACKED, THREADS, TPR, HOLD, REGISTERS>, dim3((p.rows + rows - 1) / rows), dim3(THREADS),
                0, s, p);
}

template <typename T, bool FOUR, bool CENTERED, int THREADS, int TPR>
int launch_staged(const QuantizeArgs& p, cudaStream_t s) {
  constexpr auto kernel = quantize_staged_kernel<T, FOUR, CENTERED, THREADS, TPR, kRegisters>;
  constexpr int rows = THREADS / TPR;
  const cudaError_t e = allow_shared_memory<kernel>(kMostShared);
  if (e != cudaSuccess) return e;
  const int shared = rows * staged_vectors<CENTERED, TPR>(p.k / 16) * 16;
  return launch(kernel, dim3((p.rows + rows - 1) / rows), dim3(THREADS), shared, s, p);
}

// From this many blocks on every multiprocessor is busy with several blocks a thread, which share the work of their row.
constexpr int64_t kManyBlocks = 262144;
constexpr int kLongestStaged = 3072;  // blocks of a row

bool is_many(const QuantizeArgs& p) { return (int64_t)p.rows * (p.k / 16) >= kManyBlocks && p.k / 16 <= kLongestStaged; }

// Threads of a row: with three to eight blocks each, or two in registers where nearly all have two.
template <typename T, bool FOUR, bool CENTERED>
int launch_many(const QuantizeArgs& p, cudaStream_t s) {
  const int blocks = p.k / 16;
  if constexpr (CENTERED) {
    if (blocks > 112 && blocks <= 128) return launch_rows<T, FOUR, false, 64, 64, 2, kRegisters>(p, s);
    if (blocks > 224 && blocks <= 256) return launch_rows<T, FOUR, false, 128, 128, 2, kRegisters>(p, s);
  }
  if (blocks <= 64) return launch_staged<T, FOUR, CENTERED, 128, 16>(p, s);
  if (blocks <= 128) return launch_staged<T, FOUR, CENTERED, 128, 32>(p, s);
  if (blocks <= 256) return launch_staged<T, FOUR, CENTERED, 128, 64>(p, s);
  return launch_staged<T, FOUR, CENTERED, 128, 128>(p, s);
}

template <typename T, bool FOUR>
int launch_many(const QuantizeArgs& p, cudaStream_t s) {
  return p.center != nullptr ? launch_many<T, FOUR, true>(p, s) : launch_many<T, FOUR, false>(p, s);
}

template <typename T, bool FOUR, bool PACKED>
struct LaunchQuantize {
  const QuantizeArgs& p;
  cudaStream_t s;
  template <int TPR, int HOLD>
  int operator()() const {
    return launch_rows<T, FOUR, PACKED, TPR <= 128 ? 128 : TPR, TPR, HOLD, HOLD == 1 ? 64 : kRegisters>(p, s);
  }
};

template <typename T, bool FOUR>
struct LaunchPrologue {
  const AlignArgs& a;
  const QuantizeArgs& p;
  cudaStream_t s;
  template <int TPR, int HOLD>
  int operator()() const {
    constexpr int threads = (TPR > kThreads ? TPR : kThreads), rows = threads / TPR;
    const dim3 grid(a.blocks + (p.rows + rows - 1) / rows);
    return launch(prologue_kernel<T, FOUR, threads, TPR, HOLD, (TPR > kThreads ? 64 : kRegisters)>, grid, dim3(threads), 0, s, a, p);
  }
};

template <typename T, bool FOUR, bool PACKED>
int launch_quantize(const QuantizeArgs& p, cudaStream_t s) {
  if (!PACKED && is_many(p)) return launch_many<T, FOUR>(p, s);
  return for_row<PACKED>(p.k, LaunchQuantize<T, FOUR, PACKED>{p, s});
}

template <typename T, bool FOUR>
int launch_prologue(const AlignArgs& a, const QuantizeArgs& p, cudaStream_t s) {
  if (!is_many(p)) return for_row<false>(p.k, LaunchPrologue<T, FOUR>{a, p, s});
  QuantizeArgs none = p;
  none.rows = 0;
  const int e = LaunchPrologue<T, FOUR>{a, none, s}.template operator()<16, 1>();
  return e != 0 ? e : launch_many<T, FOUR>(p, s);
}

template <typename In>
int launch_sum(const SumArgs& p, int out_dtype, cudaStream_t s) {
  const dim3 grid(sum_blocks<In>(p, kThreads));
  const auto run = [&](auto out) {
    using Out = decltype(out);
    const bool split = p.shift > 0 || p.pair_expert == nullptr;
    return launch(split ? sum_kernel<In, Out, true> : sum_kernel<In, Out, false>, grid, dim3(kThreads), 0, s, p);
  };
  return out_dtype == 0 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace
}  // namespace quads

// in_dtype: 0 bfloat16, 1 float16.
extern "C" int quads_quantize(const quads::QuantizeArgs* p, int in_dtype, int four_over_six, int packed, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p->rows == 0) return 0;
  if (in_dtype == 0) {
    if (packed) return four_over_six ? launch_quantize<__nv_bfloat16, true, true>(*p, s) : launch_quantize<__nv_bfloat16, false, true>(*p, s);
    return four_over_six ? launch_quantize<__nv_bfloat16, true, false>(*p, s) : launch_quantize<__nv_bfloat16, false, false>(*p, s);
  }
  if (packed) return four_over_six ? launch_quantize<__half, true, true>(*p, s) : launch_quantize<__half, false, true>(*p, s);
  return four_over_six ? launch_quantize<__half, true, false>(*p, s) : launch_quantize<__half, false, false>(*p, s);
}

// Pairs that one block of the grouping takes; AlignArgs.blocks is the number of blocks that this makes.
extern "C" int quads_pairs_per_block() { return quads::kPairsPerBlock; }

// Grouping and quantization of the layer's input; one launch for few pairs, two otherwise.
extern "C" int quads_prologue(const quads::AlignArgs* a, const quads::QuantizeArgs* p, int in_dtype, int four_over_six,
                              void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (a->local_experts > kMaxExperts || (int64_t)a->blocks * kPairsPerBlock < a->pairs) return cudaErrorInvalidValue;
  const int e = in_dtype == 0
                    ? (four_over_six ? launch_prologue<__nv_bfloat16, true>(*a, *p, s) : launch_prologue<__nv_bfloat16, false>(*a, *p, s))
                    : (four_over_six ? launch_prologue<__half, true>(*a, *p, s) : launch_prologue<__half, false>(*a, *p, s));
  if (e != 0 || a->blocks == 1) return e;
  return launch(scatter_kernel, dim3(a->blocks), dim3(kThreads), 0, s, *a);
}

// in_dtype, of y: 0 bfloat16, 1 float16, 2 float32; out_dtype: 0 bfloat16, 1 float16.
extern "C" int quads_sum(const quads::SumArgs* p, int in_dtype, int out_dtype, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p->tokens == 0) return 0;
  if (in_dtype == 0) return launch_sum<__nv_bfloat16>(*p, out_dtype, s);
  if (in_dtype == 1) return launch_sum<__half>(*p, out_dtype, s);
  return launch_sum<float>(*p, out_dtype, s);
}

extern "C" const char* quads_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
