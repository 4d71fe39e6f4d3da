// SPDX-License-Identifier: Apache-2.0
// Online activation quantization with residual, bit-identical to vllm_quads.nvfp4.reference / vllm_quads.compensation,
// and the small kernels around the MoE GEMMs: grouping of (token, expert) pairs and the top-k sum.
//
// Quantization: one thread per 16-channel block, a power-of-two group of threads per row; the row's amax (per-token
// global scale) is one reduction, after which the row is read again from cache.
#include "common.cuh"
#include "nvfp4_math.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct QuantizeArgs {
  const void* x;              // [rows, ldx] bfloat16 or float16
  const float* center;        // [K] or null
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
};

// Mirrored in vllm_quads/kernels/_native.py.
struct AlignArgs {
  const int* ids;          // [pairs * id_stride] expert ids (id_stride 2 reads the low words of int64)
  const int* expert_map;   // [global experts] or null: local expert or -1
  int* pair_expert;        // [pairs]: local expert or -1
  int* sorted;             // [pairs]
  int* segments;           // [max segments][3]: expert, first entry of `sorted`, count
  int* num_segments;       // [1]
  int* rank;               // [pairs]: scratch, only with several blocks
  int* histogram;          // [blocks][local experts]: scratch, only with several blocks
  int pairs, id_stride, global_experts, local_experts, capacity, blocks;
};

namespace {

constexpr int kThreads = 256;
constexpr int kMaxExperts = 1024;

template <typename T>
__device__ __forceinline__ void load_block(const T* p, const float* center, float (&x)[16]) {
  uint4 raw[2];
  raw[0] = *reinterpret_cast<const uint4*>(p);
  raw[1] = *reinterpret_cast<const uint4*>(p + 8);
  const T* values = reinterpret_cast<const T*>(raw);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = to_float<T>(values[i]);
  if (center != nullptr) {
    const float4* c = reinterpret_cast<const float4*>(center);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = c[i];
      x[4 * i] = sub_rn(x[4 * i], v.x);
      x[4 * i + 1] = sub_rn(x[4 * i + 1], v.y);
      x[4 * i + 2] = sub_rn(x[4 * i + 2], v.z);
      x[4 * i + 3] = sub_rn(x[4 * i + 3], v.w);
    }
  }
}

__device__ __forceinline__ int64_t scale_offset(int row, int column, int columns, int swizzled) {
  if (!swizzled) return (int64_t)row * columns + column;
  const int column_tiles = (columns + 3) / 4;
  return ((int64_t)(row / 128) * column_tiles + column / 4) * 512 + (row % 32) * 16 + (row / 32) % 4 * 4 + column % 4;
}

// max over a row's TPR threads; TPR > 32 goes through shared memory.
template <int TPR>
__device__ __forceinline__ float row_max(float m) {
#pragma unroll
  for (int offset = (TPR < 32 ? TPR : 32) / 2; offset > 0; offset /= 2)
    m = max_magnitude(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
  if (TPR > 32) {
    __shared__ float partial[kThreads / 32];
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
    __syncthreads();
    const int first = threadIdx.x / TPR * (TPR / 32);
#pragma unroll
    for (int i = 0; i < TPR / 32; ++i) m = max_magnitude(m, partial[first + i]);
  }
  return m;
}

template <typename T, bool FOUR, bool PACKED, int TPR>
__device__ __forceinline__ void quantize_rows(const QuantizeArgs& p, int first_row) {
  const int lane = threadIdx.x % TPR;
  const int row = first_row + threadIdx.x / TPR;
  const int group = row >= p.rows ? -1 : p.group == nullptr ? 0 : p.group[row];
  const bool active = group >= 0;
  const int blocks = p.k / 16;
  const T* x = reinterpret_cast<const T*>(p.x) + (int64_t)row * p.ldx;

  float v[16];
  float m = 0.0f;
  if (p.g == nullptr) {
    if (active)
      for (int b = lane; b < blocks; b += TPR) {
        load_block<T>(x + 16 * b, p.center == nullptr ? nullptr : p.center + 16 * b, v);
        m = max_magnitude(m, amax16(v));
      }
    m = row_max<TPR>(m);
  }
  if (!active) return;
  const float g = p.g != nullptr ? p.g[group] : encode_scale(m, FOUR ? kRangeFourOverSix : kRangeMaxToSix);
  const float decode = div_rn(1.0f, g);
  if (lane == 0) p.decode[row] = decode;
  const bool full = p.full_all || (p.full != nullptr && p.full[row / p.full_divisor]);

  const int total = PACKED ? blocks + p.num_appended : p.ldm / 16;
  for (int i = lane; i < total; i += TPR) {
    const bool appended = PACKED && i >= blocks;
    const int b = appended ? p.appended[i - blocks] : i;
    if (!PACKED && b >= blocks) {
      uint4* out = reinterpret_cast<uint4*>(p.merged + (int64_t)row * p.ldm + 16 * b);
      out[0] = out[1] = make_uint4(0, 0, 0, 0);
      continue;
    }
    // the block of the first pass is still in registers when a thread has only one
    if (blocks > TPR || p.g != nullptr || appended)
      load_block<T>(x + 16 * b, p.center == nullptr ? nullptr : p.center + 16 * b, v);
    Block block;
    quantize_block<FOUR>(v, g, decode, block);
    if (PACKED) {
      BlockScale s = block.scale;
      uint32_t words[2];
      if (appended) {
        float qr[16];
        s = quantize_residual(block, g, decode, qr);
        drop_negative_zeros(block.r);
        block_codes(block.r, s.o, words);
      } else {
        block_codes(v, s.o, words);
      }
      *reinterpret_cast<uint2*>(p.codes + (int64_t)row * (total * 8) + i * 8) = make_uint2(words[0], words[1]);
      p.scales[scale_offset(row, i, total, p.swizzled)] = (uint8_t)s.byte;
    } else {
      if (full || (p.mask != nullptr && p.mask[(int64_t)group * blocks + b])) {
        float qr[16];
        const BlockScale r = quantize_residual(block, g, decode, qr);
        // p is exact, and so is its sum with qr * s: one rounding, to FP16
#pragma unroll
        for (int j = 0; j < 16; ++j) block.p[j] = fma_rn(qr[j], r.s, block.p[j]);
      }
      __half2 out[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = __floats2half2_rn(block.p[2 * j], block.p[2 * j + 1]);
      uint4* target = reinterpret_cast<uint4*>(p.merged + (int64_t)row * p.ldm + 16 * b);
      target[0] = reinterpret_cast<const uint4*>(out)[0];
      target[1] = reinterpret_cast<const uint4*>(out)[1];
    }
  }
}

template <typename T, bool FOUR, bool PACKED, int TPR>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const QuantizeArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  quantize_rows<T, FOUR, PACKED, TPR>(p, blockIdx.x * (kThreads / TPR));
}

// Grouping: pairs by local expert, each expert's list cut into equal segments of at most `capacity`. The order of pairs within an
// expert depends on the run; no result does, since a pair's arithmetic does not depend on its place in a segment.

constexpr int kPairsPerBlock = 2048;
constexpr int kBatch = kPairsPerBlock / kThreads;  // of one thread

// Local experts of this thread's pairs base + j * kThreads (all loads in flight at once), written to pair_expert.
__device__ __forceinline__ void load_experts(const AlignArgs& p, int base, int (&e)[kBatch]) {
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = base + j * kThreads;
    e[j] = i < p.pairs ? p.ids[(int64_t)i * p.id_stride] : -1;
    if (e[j] >= p.global_experts) e[j] = -1;
  }
  if (p.expert_map != nullptr) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) e[j] = e[j] < 0 ? -1 : p.expert_map[e[j]];
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = base + j * kThreads;
    if (e[j] < 0 || e[j] >= p.local_experts) e[j] = -1;
    if (i < p.pairs) p.pair_expert[i] = e[j];
  }
}

// One warp: start[e] = first entry of expert e, from its count; optionally the segments.
__device__ __forceinline__ void scan_experts(const AlignArgs& p, const int* count, int* start, bool write_segments) {
  const int lane = threadIdx.x % 32;
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
    if (e < p.local_experts) {
      start[e] = pairs + pair_sum - c;
      for (int i = 0; write_segments && i < s; ++i) {
        // equal parts, so that no part runs nearly empty
        int* segment = p.segments + 3 * (segments + segment_sum - s + i);
        const int begin = (int)((int64_t)c * i / s), end = (int)((int64_t)c * (i + 1) / s);
        segment[0] = e;
        segment[1] = start[e] + begin;
        segment[2] = end - begin;
      }
    }
    pairs += __shfl_sync(0xFFFFFFFFu, pair_sum, 31);
    segments += __shfl_sync(0xFFFFFFFFu, segment_sum, 31);
  }
  if (write_segments && lane == 0) *p.num_segments = segments;
}

// All of it in one block, for up to kPairsPerBlock pairs; with more, the first of two passes: experts, ranks, histograms.
__device__ __forceinline__ void align_pairs(const AlignArgs& p) {
  __shared__ int count[kMaxExperts];
  __shared__ int start[kMaxExperts];
  for (int e = threadIdx.x; e < p.local_experts; e += kThreads) count[e] = 0;
  int e[kBatch], rank[kBatch];
  const int base = blockIdx.x * kPairsPerBlock + threadIdx.x;
  load_experts(p, base, e);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kBatch; ++j) rank[j] = e[j] >= 0 ? atomicAdd(&count[e[j]], 1) : 0;
  __syncthreads();
  if (p.blocks > 1) {
    for (int i = threadIdx.x; i < p.local_experts; i += kThreads) p.histogram[blockIdx.x * p.local_experts + i] = count[i];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (e[j] >= 0) p.rank[base + j * kThreads] = rank[j];
    return;
  }
  if (threadIdx.x < 32) scan_experts(p, count, start, true);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kBatch; ++j)
    if (e[j] >= 0) p.sorted[start[e[j]] + rank[j]] = base + j * kThreads;
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
  if (threadIdx.x < 32) scan_experts(p, count, start, blockIdx.x == 0);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = blockIdx.x * kPairsPerBlock + threadIdx.x + j * kThreads;
    if (i >= p.pairs) break;
    const int e = p.pair_expert[i];
    if (e >= 0) p.sorted[start[e] + before[e] + p.rank[i]] = i;
  }
}

// Grouping (the first blocks) and quantization of the layer's input (the others) in one launch.
template <typename T, bool FOUR, int TPR>
__global__ void __launch_bounds__(kThreads) prologue_kernel(const AlignArgs a, const QuantizeArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if ((int)blockIdx.x < a.blocks)
    align_pairs(a);
  else
    quantize_rows<T, FOUR, false, TPR>(p, (blockIdx.x - a.blocks) * (kThreads / TPR));
}

template <typename T>
struct alignas(16) Vec {
  T v[16 / sizeof(T)];
};

// out[t, :] = sum over the token's valid pairs of y[pair, :], in order of the top-k slot, float32, one rounding.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) sum_kernel(const In* y, const int* pair_expert, Out* out, int tokens, int top_k,
                                                       int columns, int ldy, int64_t ldo) {
  grid_dependency_launch();
  grid_dependency_wait();
  constexpr int W = 16 / sizeof(In);
  const int per_row = columns / W;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < (int64_t)tokens * per_row;
       i += (int64_t)gridDim.x * kThreads) {
    const int token = (int)(i / per_row), c = (int)(i % per_row) * W;
    float sum[W];
#pragma unroll
    for (int j = 0; j < W; ++j) sum[j] = 0.0f;
#pragma unroll 8
    for (int k = 0; k < top_k; ++k) {
      const int pair = token * top_k + k;
      if (pair_expert[pair] < 0) continue;
      const Vec<In> v = *reinterpret_cast<const Vec<In>*>(y + (int64_t)pair * ldy + c);
#pragma unroll
      for (int j = 0; j < W; ++j) sum[j] += to_float<In>(v.v[j]);
    }
    Out* target = out + (int64_t)token * ldo + c;
    alignas(16) Out rounded[W];
#pragma unroll
    for (int j = 0; j < W; ++j) rounded[j] = from_float<Out>(sum[j]);
    if constexpr (sizeof(Out) * W == 16)
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(rounded);
    else
      *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(rounded);
  }
}

int threads_per_row(int k) {
  const int blocks = k / 16;
  int t = 16;
  while (t < blocks && t < kThreads) t *= 2;
  return t;
}

template <typename T, bool FOUR, bool PACKED>
int launch_quantize(const QuantizeArgs& p, cudaStream_t s) {
  const int tpr = threads_per_row(p.k);
  const dim3 grid((p.rows + kThreads / tpr - 1) / (kThreads / tpr));
  switch (tpr) {
    case 16: return launch(quantize_kernel<T, FOUR, PACKED, 16>, grid, dim3(kThreads), 0, s, p);
    case 32: return launch(quantize_kernel<T, FOUR, PACKED, 32>, grid, dim3(kThreads), 0, s, p);
    case 64: return launch(quantize_kernel<T, FOUR, PACKED, 64>, grid, dim3(kThreads), 0, s, p);
    case 128: return launch(quantize_kernel<T, FOUR, PACKED, 128>, grid, dim3(kThreads), 0, s, p);
    default: return launch(quantize_kernel<T, FOUR, PACKED, 256>, grid, dim3(kThreads), 0, s, p);
  }
}

template <typename T, bool FOUR>
int launch_prologue(const AlignArgs& a, const QuantizeArgs& p, cudaStream_t s) {
  const int tpr = threads_per_row(p.k);
  const dim3 grid(a.blocks + (p.rows + kThreads / tpr - 1) / (kThreads / tpr));
  switch (tpr) {
    case 16: return launch(prologue_kernel<T, FOUR, 16>, grid, dim3(kThreads), 0, s, a, p);
    case 32: return launch(prologue_kernel<T, FOUR, 32>, grid, dim3(kThreads), 0, s, a, p);
    case 64: return launch(prologue_kernel<T, FOUR, 64>, grid, dim3(kThreads), 0, s, a, p);
    case 128: return launch(prologue_kernel<T, FOUR, 128>, grid, dim3(kThreads), 0, s, a, p);
    default: return launch(prologue_kernel<T, FOUR, 256>, grid, dim3(kThreads), 0, s, a, p);
  }
}

template <typename In>
int launch_sum(const void* y, const int* pair_expert, void* out, int tokens, int top_k, int columns, int ldy, int64_t ldo,
               int out_dtype, cudaStream_t s) {
  const int64_t items = (int64_t)tokens * (columns / (16 / (int)sizeof(In)));
  int64_t blocks = (items + kThreads - 1) / kThreads;
  const dim3 grid((unsigned)(blocks < 16 * 1024 ? blocks : 16 * 1024));
  const In* in = static_cast<const In*>(y);
  if (out_dtype == 0)
    return launch(sum_kernel<In, __nv_bfloat16>, grid, dim3(kThreads), 0, s, in, pair_expert,
                  static_cast<__nv_bfloat16*>(out), tokens, top_k, columns, ldy, ldo);
  return launch(sum_kernel<In, __half>, grid, dim3(kThreads), 0, s, in, pair_expert, static_cast<__half*>(out), tokens,
                top_k, columns, ldy, ldo);
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

// y: 0 bfloat16, 1 float16, 2 float32; out: 0 bfloat16, 1 float16.
extern "C" int quads_sum(const void* y, const int* pair_expert, void* out, int tokens, int top_k, int columns, int ldy,
                         int64_t ldo, int in_dtype, int out_dtype, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (tokens == 0) return 0;
  if (in_dtype == 0) return launch_sum<__nv_bfloat16>(y, pair_expert, out, tokens, top_k, columns, ldy, ldo, out_dtype, s);
  if (in_dtype == 1) return launch_sum<__half>(y, pair_expert, out, tokens, top_k, columns, ldy, ldo, out_dtype, s);
  return launch_sum<float>(y, pair_expert, out, tokens, top_k, columns, ldy, ldo, out_dtype, s);
}

extern "C" const char* quads_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
