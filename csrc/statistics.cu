// SPDX-License-Identifier: Apache-2.0
// Error statistics of quantized activations, gathered inside a captured CUDA graph: what
// vllm_quads/compensation/statistics.py sums up, for up to two sites of a layer in one launch.
//
// A captured graph cannot skip a launch, so every block first reads a switch on the device, and a MoE layer's blocks join the launch
// that sums its pairs, which would be there anyway. Blocks are divided among three jobs: the residual's energy of either site,
// and the ring of recent rows of the first one. A slot of threads takes a row at a time, one 16-channel block a thread; what a
// thread block has summed goes to the accumulators when the group changes, neighbouring channels and slots together.
#include "common.cuh"
#include "nvfp4_math.cuh"
#include "sum.cuh"

namespace quads {

// Mirrored in vllm_quads/kernels/_native.py.
struct StatisticsSite {
  const void* x;           // [rows, ldx] bfloat16 or float16
  const float* center;     // [k] or null
  const float* g;          // static encode global scales [groups] or null (one per row, from its amax)
  const int* group;        // [rows] or null (all 0); negative rows are skipped
  const int* order;        // [rows] or null: the rows, sorted by group
  const int* num_segments;  // with `order`: [2], the second is the number of its rows
  double* energy;          // [groups, k]
  unsigned long long* tokens;  // [groups]
  int rows, k, ldx;
  int divisor;             // row / divisor is the token that `valid` counts
  int blocks;              // thread blocks of this site
};

// Mirrored in vllm_quads/kernels/_native.py.
struct StatisticsArgs {
  StatisticsSite site[2];
  const int* paused;         // [1]: not zero: gather nothing
  const int* valid;          // [1] or null: tokens that count, the others are padding
  const float* size;         // [rows of site 0]: magnitude of each row, tells which rows are finite
  __nv_bfloat16* ring;       // [ring_rows, k] of site 0
  unsigned long long* written;
  unsigned int* ticket;      // [1], zero between launches
  int ring_rows, ring_blocks;
};

namespace {

constexpr int kThreads = 256;
constexpr int kMaxRing = 1024;
// Rows of a larger magnitude (or scale) do not count: their squares would overflow. NaN compares false.
constexpr float kLargestRow = 1.1258999e15f;

template <typename T>
__device__ __forceinline__ void load_block(const T* p, const float* center, float (&x)[16]) {
  alignas(16) T raw[16];
  reinterpret_cast<uint4*>(raw)[0] = reinterpret_cast<const uint4*>(p)[0];
  reinterpret_cast<uint4*>(raw)[1] = reinterpret_cast<const uint4*>(p)[1];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = to_float<T>(raw[i]);
    if (center != nullptr) x[i] = sub_rn(x[i], center[i]);
  }
}

// Threads of a row, a power of two; rows that are wider are cut into parts, one a thread block.
__host__ __device__ __forceinline__ int threads_per_row(int blocks) {
  int n = 32;
  while (n < blocks && n < kThreads) n *= 2;
  return n;
}

template <typename T, bool FOUR>
__device__ __forceinline__ void gather_energy(const StatisticsSite& s, const int* valid, int block) {
  __shared__ float partial[2][kThreads / 32];
  // [slot][vector of a block][lane], padded: 32 neighbouring channels lie in as many banks
  __shared__ float4 staged[4 * (kThreads + 2 * kThreads / 32)];
  __shared__ int staged_group[kThreads / 32];
  const int blocks = s.k / 16, per_row = threads_per_row(blocks), slots = kThreads / per_row;
  const int parts = (blocks + per_row - 1) / per_row;  // K > 4096: each thread block sums a part of the channels
  const int part = block % parts, lane = threadIdx.x % per_row, slot = threadIdx.x / per_row;
  int rows = s.rows;
  if (s.order != nullptr) rows = s.num_segments[1];
  const int run = (rows + slots * (s.blocks / parts) - 1) / (slots * (s.blocks / parts)), first = block / parts * run * slots + slot;
  const int tokens = valid == nullptr ? 0x7FFFFFFF : *valid;
  const int b = part * per_row + lane, pitch = per_row + 2;

  float4* const mine = staged + slot * 4 * pitch + lane;
  int current = -1, count = 0;  // what is staged
  const auto flush = [&]() {  // by all threads
    if (lane == 0) {
      staged_group[slot] = count > 0 ? current : -1;
      if (count > 0 && part == 0) atomicAdd(s.tokens + current, (unsigned long long)count);
    }
    count = 0;
    __syncthreads();
    const int channels = 16 * min(per_row, blocks - part * per_row);
    const float* all = reinterpret_cast<const float*>(staged);
    for (int c = threadIdx.x; c < channels; c += kThreads) {
      double* energy = s.energy + 16 * part * per_row + c;
      const float* from = all + 4 * (c / 4 % 4 * pitch + c / 16) + c % 4;
      float total = 0.0f;
      int group = -1;
      for (int i = 0; i < slots; ++i) {
        const int next = staged_group[i];
        if (next < 0) continue;
        if (next != group) {
          if (group >= 0) atomicAdd(energy + (int64_t)group * s.k, (double)total);
          total = 0.0f;
          group = next;
        }
        total += from[i * 16 * pitch];
      }
      if (group >= 0) atomicAdd(energy + (int64_t)group * s.k, (double)total);
    }
    __syncthreads();
  };
  for (int i = 0; i < run; ++i) {
    const int place = first + i * slots;
    const int row = place >= rows ? -1 : s.order != nullptr ? s.order[place] : place;
    const int group = row < 0 || row / s.divisor >= tokens ? -1 : s.group != nullptr ? s.group[row] : 0;
    const T* x = static_cast<const T*>(s.x) + (int64_t)row * s.ldx;
    float v[16], m = 0.0f, own = 0.0f;
    if (group >= 0) {
      for (int j = lane; j < blocks; j += per_row) {
        load_block<T>(x + 16 * j, s.center == nullptr ? nullptr : s.center + 16 * j, v);
        own = amax16(v);
        m = max_magnitude(m, own);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) m = max_magnitude(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
    if (per_row > 32) {
      float* shared = partial[i % 2];
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = m;
      __syncthreads();
      const int warp = threadIdx.x / per_row * (per_row / 32);
      for (int j = 0; j < per_row / 32; ++j) m = max_magnitude(m, shared[warp + j]);
    }
    RowScale scale = {};
    bool counts = group >= 0;  // the same for all threads of the row
    if (counts) {
      scale = row_scale(s.g != nullptr ? s.g[group] : encode_scale(m, FOUR ? kRangeFourOverSix : kRangeMaxToSix));
      counts = (s.g != nullptr ? m : scale.decode) < kLargestRow;
    }
    if (i > 0 && __syncthreads_or(counts && group != current && count > 0)) flush();
    if (!counts) continue;
    current = group;
    const bool first_row = count++ == 0;
    if (b >= blocks) continue;
    if (parts > 1) {
      load_block<T>(x + 16 * b, s.center == nullptr ? nullptr : s.center + 16 * b, v);
      own = amax16(v);
    }
    float q[16], p[16], r[16];
    residual_block(v, q, quantize_block<FOUR>(v, own, scale, q).s, scale.decode, p, r);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 old = first_row ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : mine[j * pitch];
      mine[j * pitch] = make_float4(fma_rn(r[4 * j], r[4 * j], old.x), fma_rn(r[4 * j + 1], r[4 * j + 1], old.y),
                                    fma_rn(r[4 * j + 2], r[4 * j + 2], old.z), fma_rn(r[4 * j + 3], r[4 * j + 3], old.w));
    }
  }
  flush();
}

// The last rows of this step that count go to the ring, in order; `written` is advanced by the block that finishes last.
template <typename T>
__device__ __forceinline__ void fill_ring(const StatisticsArgs& p, int block) {
  __shared__ int slots[kMaxRing];
  __shared__ int warp_counts[kThreads / 32];
  const StatisticsSite& s = p.site[0];
  const int rows = p.valid == nullptr ? s.rows : min(s.rows, *p.valid);
  const int n = min(rows, p.ring_rows), first = rows - n;
  const unsigned long long written = *static_cast<volatile unsigned long long*>(p.written);
  int before = 0;
  for (int base = 0; base < n; base += kThreads) {
    const int i = base + threadIdx.x;
    const bool counts = i < n && p.size[first + i] < kLargestRow;
    const unsigned ballot = __ballot_sync(0xFFFFFFFFu, counts);
    if (threadIdx.x % 32 == 0) warp_counts[threadIdx.x / 32] = __popc(ballot);
    __syncthreads();
    int own = __popc(ballot & ((1u << (threadIdx.x % 32)) - 1u)), total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < (int)threadIdx.x / 32) own += warp_counts[w];
      total += warp_counts[w];
    }
    if (i < n) slots[i] = counts ? (int)((written + before + own) % p.ring_rows) : -1;
    before += total;
    __syncthreads();
  }
  const int words = s.k / 8;
  for (int i = block; i < n; i += p.ring_blocks) {
    if (slots[i] < 0) continue;
    const T* source = static_cast<const T*>(s.x) + (int64_t)(first + i) * s.ldx;
    __nv_bfloat16* target = p.ring + (int64_t)slots[i] * s.k;
    for (int w = threadIdx.x; w < words; w += kThreads) {
      alignas(16) T in[8];
      alignas(16) __nv_bfloat16 out[8];
      *reinterpret_cast<uint4*>(in) = reinterpret_cast<const uint4*>(source)[w];
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = from_float<__nv_bfloat16>(to_float<T>(in[j]));
      reinterpret_cast<uint4*>(target)[w] = *reinterpret_cast<const uint4*>(out);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(p.ticket, 1u) == (unsigned)p.ring_blocks - 1u) {
      *p.written = written + before;
      *p.ticket = 0;
    }
  }
}

constexpr int kBlocksPerMultiprocessor = 3;

template <typename T, bool FOUR>
__device__ __forceinline__ void gather(const StatisticsArgs& p, int block) {
  if (*p.paused != 0) return;
  if (block < p.ring_blocks) return fill_ring<T>(p, block);
  block -= p.ring_blocks;
  if (block < p.site[0].blocks) return gather_energy<T, FOUR>(p.site[0], p.valid, block);
  gather_energy<T, FOUR>(p.site[1], p.valid, block - p.site[0].blocks);
}

template <typename T, bool FOUR>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) statistics_kernel(const StatisticsArgs p) {
  grid_dependency_launch();
  grid_dependency_wait();
  gather<T, FOUR>(p, blockIdx.x);
}

// The first `summing` blocks end the layer.
template <typename In, typename T, bool FOUR>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) sum_statistics_kernel(const SumArgs sum, const StatisticsArgs p,
                                                                                            unsigned summing) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < summing)
    sum_pairs<In, T, true, kThreads>(sum, blockIdx.x, summing);
  else
    gather<T, FOUR>(p, blockIdx.x - summing);
}

// Magnitude of each row, for static global scales, which tell nothing about a row. One warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) row_size_kernel(const void* x, int rows, int k, int ldx, const int* paused, float* size) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (*paused != 0) return;
  const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float v[16], m = 0.0f;
  for (int j = lane; j < k / 16; j += 32) {
    load_block<T>(static_cast<const T*>(x) + (int64_t)row * ldx + 16 * j, nullptr, v);
    m = max_magnitude(m, amax16(v));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) m = max_magnitude(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
  if (lane == 0) size[row] = m;
}

// Thread blocks of a site: enough for every row to have a slot (a row takes longer than additions to memory), at most one wave; a
// multiple of the parts of a wide row.
int energy_blocks(const StatisticsSite& s) {
  const int blocks = s.k / 16, per_row = threads_per_row(blocks);
  const int parts = (blocks + per_row - 1) / per_row, slots = kThreads / per_row;
  const int wanted = (s.rows + slots - 1) / slots, most = kBlocksPerMultiprocessor * multiprocessors() / parts;
  return parts * (wanted < most ? wanted : most);
}

// Fills in how many blocks each job has; returns their sum, or minus a CUDA error.
template <typename T>
int share_out(StatisticsArgs& p, float* scratch, cudaStream_t s) {
  for (StatisticsSite& site : p.site) site.blocks = site.rows > 0 ? energy_blocks(site) : 0;
  p.ring_blocks = 0;
  if (p.ring_rows > 0) {
    const int rows = p.site[0].rows < p.ring_rows ? p.site[0].rows : p.ring_rows;
    p.ring_blocks = rows < 64 ? rows : 64;
    if (p.size == nullptr) {
      const StatisticsSite& x = p.site[0];
      const int e = launch(row_size_kernel<T>, dim3((x.rows + kThreads / 32 - 1) / (kThreads / 32)), dim3(kThreads), 0, s, x.x, x.rows,
                           x.k, x.ldx, p.paused, scratch);
      if (e != 0) return -e;
      p.size = scratch;
    }
  }
  return p.ring_blocks + p.site[0].blocks + p.site[1].blocks;
}

template <typename T>
int launch_statistics(StatisticsArgs p, int four_over_six, float* scratch, cudaStream_t s) {
  const int blocks = share_out<T>(p, scratch, s);
  if (blocks <= 0) return -blocks;
  return launch(four_over_six ? statistics_kernel<T, true> : statistics_kernel<T, false>, dim3(blocks), dim3(kThreads), 0, s, p);
}

template <typename In, typename T>
int launch_sum_statistics(const SumArgs& sum, StatisticsArgs p, int four_over_six, float* scratch, cudaStream_t s) {
  const int blocks = share_out<T>(p, scratch, s);
  if (blocks < 0) return -blocks;
  const unsigned summing = sum_blocks<In>(sum, kThreads);
  return launch(four_over_six ? sum_statistics_kernel<In, T, true> : sum_statistics_kernel<In, T, false>, dim3(summing + blocks),
                dim3(kThreads), 0, s, sum, p, summing);
}

}  // namespace
}  // namespace quads

// dtype of both sites' rows: 0 bfloat16, 1 float16. scratch: float [rows of site 0], used if p->size is null and there is a ring.
extern "C" int quads_statistics(const quads::StatisticsArgs* p, int dtype, int four_over_six, float* scratch, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p->ring_rows > kMaxRing) return cudaErrorInvalidValue;
  if (dtype == 0) return launch_statistics<__nv_bfloat16>(*p, four_over_six, scratch, s);
  return launch_statistics<__half>(*p, four_over_six, scratch, s);
}

// The same together with quads_sum. partials: 0 y is of `dtype`, as the output and both sites' rows are, 1 y is float32.
extern "C" int quads_sum_statistics(const quads::SumArgs* sum, const quads::StatisticsArgs* p, int partials, int dtype,
                                    int four_over_six, float* scratch, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (p->ring_rows > kMaxRing) return cudaErrorInvalidValue;
  if (dtype == 0)
    return partials ? launch_sum_statistics<float, __nv_bfloat16>(*sum, *p, four_over_six, scratch, s)
                    : launch_sum_statistics<__nv_bfloat16, __nv_bfloat16>(*sum, *p, four_over_six, scratch, s);
  return partials ? launch_sum_statistics<float, __half>(*sum, *p, four_over_six, scratch, s)
                  : launch_sum_statistics<__half, __half>(*sum, *p, four_over_six, scratch, s);
}
