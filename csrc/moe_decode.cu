// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for small token counts: y[pair, n] = sum_k W[expert, n, k] * X[row, k], packed NVFP4 weights.
//
// Bound by the weight bytes, so everything serves one continuous stream of them:
//   - persistent: one block per multiprocessor, each with a contiguous share of (segment, row tile) units;
//   - one warp only feeds a ring of 9216-byte stages with bulk copies, across units and segments, without a stop;
//   - eight warps read their A fragments from the ring (16 bytes a lane, no bank conflict), decode in registers and run
//     mma.m16n8k16 (FP16 in, FP32 accumulate), the tokens being the N dimension in steps of 8;
//   - the tokens of a segment (up to 32 of one expert, whole K) stay in shared memory while all row tiles of the segment that
//     this block has are streamed past them;
//   - warps that share rows split K and add their accumulators in a fixed order, so results do not depend on the run,
//     on the other tokens of the batch, or on which block computed them.
#include "moe_params.cuh"

namespace quads {
namespace {

constexpr int kStageBytes = 4 * kBlockBytes;
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + 1);
constexpr int kMaxStages = 20;
constexpr int kMaxTiles = 4;  // of 8 tokens
constexpr int kMetaBytes = kMaxTiles * 8 * sizeof(TokenMeta);
constexpr int kSmemLimit = 232448;
constexpr int kAllConsumers = 15;  // barrier id

struct Layout {
  int stages;
  int operand_stride;  // bytes; rows are 16 bytes apart modulo 128, so ldmatrix meets no bank conflict
  int reduce_bytes;    // one of two buffers
  int operand_offset, reduce_offset, meta_offset, barrier_offset, total;
};

template <int RG, int KG>
__host__ __device__ Layout make_layout(int kblocks, int max_tokens) {
  Layout l;
  const int tiles = max_tokens / 8;
  l.operand_stride = kblocks * 128 + 16;
  l.reduce_bytes = RG * 2 * tiles * (KG - 1) * 512;
  const int fixed = max_tokens * l.operand_stride + 2 * l.reduce_bytes + kMetaBytes + 2 * 8 * kMaxStages + 128;
  int stages = (kSmemLimit - fixed) / kStageBytes;
  l.stages = stages > kMaxStages ? kMaxStages : stages;
  l.operand_offset = l.stages * kStageBytes;
  l.reduce_offset = l.operand_offset + max_tokens * l.operand_stride;
  l.meta_offset = l.reduce_offset + 2 * l.reduce_bytes;
  l.barrier_offset = (l.meta_offset + kMetaBytes + 15) / 16 * 16;
  l.total = l.barrier_offset + 2 * 8 * kMaxStages;
  return l;
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Weight registers of one warp and stage: 32 rows x 64 k.
struct Fragment {
  uint4 codes[2];
  uint2 scales[2];
};

struct Consumer {
  uint32_t full, empty;  // barrier arrays
  uint32_t ring;
  int stages, slot;
  uint32_t phase;
  int lane;

  __device__ __forceinline__ void load(Fragment& f, uint32_t offset_codes, uint32_t offset_scales) {
    mbar_wait(full + 8 * slot, phase);
    const uint32_t base = ring + slot * kStageBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f.codes[i].x), "=r"(f.codes[i].y), "=r"(f.codes[i].z), "=r"(f.codes[i].w)
                   : "r"(base + offset_codes + i * 512)
                   : "memory");
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(f.scales[i].x), "=r"(f.scales[i].y)
                   : "r"(base + offset_scales + i * 64)
                   : "memory");
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(empty + 8 * slot);
    if (++slot == stages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

template <int NT, int KSTEP>
__device__ __forceinline__ void multiply_step(const Fragment& f, const uint32_t (&b)[NT][4], float (&acc)[2][NT][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4];
    decode_word(word_of(f.codes[i], KSTEP), decode_scales<KSTEP>(f.scales[i]), a);
#pragma unroll
    for (int j = 0; j < NT; ++j) mma(acc[i][j], a, b[j][2 * (KSTEP & 1)], b[j][2 * (KSTEP & 1) + 1]);
  }
}

// One unit: all of K for the rows of this warp, then the sum over the K groups and the epilogue.
template <int RG, int KG, int NT, int EPILOGUE, typename Out>
__device__ __forceinline__ void compute_unit(const GemmArgs& p, const Layout& l, Consumer& c, char* smem, int expert,
                                             int row_tile, int count, int rg, int kg, int buffer) {
  const int lane = c.lane;
  const uint32_t block = ((rg >> 1) * KG + kg) * kBlockBytes;
  const uint32_t codes = block + (rg & 1) * 1024 + lane * 16;
  const uint32_t scales = block + kScaleOffset + (rg & 1) * 128 + (lane >> 2) * 8;
  uint32_t operand = smem_u32(smem + l.operand_offset) + (lane & 7) * l.operand_stride + (lane >> 3) * 16 + kg * 128;

  float acc[2][NT][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[i][j][k] = 0.0f;

  const int steps = p.kblocks / KG;
  Fragment next;
  c.load(next, codes, scales);
#pragma unroll 2
  for (int it = 0; it < steps; ++it) {
    Fragment f = next;
    if (it + 1 < steps) c.load(next, codes, scales);
    uint32_t b[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) ldmatrix_x4(operand + j * 8 * l.operand_stride, b[j]);
    multiply_step<NT, 0>(f, b, acc);
    multiply_step<NT, 1>(f, b, acc);
#pragma unroll
    for (int j = 0; j < NT; ++j) ldmatrix_x4(operand + j * 8 * l.operand_stride + 64, b[j]);
    multiply_step<NT, 2>(f, b, acc);
    multiply_step<NT, 3>(f, b, acc);
    operand += KG * 128;
  }

  // Accumulator group q = (brick, token tile) is finished by K group q % KG, summed in the order of the K groups.
  float4* reduce = reinterpret_cast<float4*>(smem + l.reduce_offset + buffer * l.reduce_bytes) + rg * 2 * NT * (KG - 1) * 32;
#pragma unroll
  for (int q = 0; q < 2 * NT; ++q) {
    const int owner = q % KG;
    const float(&a)[4] = acc[q / NT][q % NT];
    if (kg != owner) {
      const int place = kg < owner ? kg : kg - 1;
      reduce[(q * (KG - 1) + place) * 32 + lane] = make_float4(a[0], a[1], a[2], a[3]);
    }
  }
  named_barrier(1 + rg, 32 * KG);

  const TokenMeta* meta = reinterpret_cast<const TokenMeta*>(smem + l.meta_offset);
  const float2 alpha = load_alpha(p, expert);
#pragma unroll
  for (int q = 0; q < 2 * NT; ++q) {
    if (kg != q % KG) continue;
    const int brick = q / NT, tile = q % NT;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < KG; ++k) {
      float part[4];
      if (k == q % KG) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = acc[brick][tile][i];
      } else {
        const float4 v = reduce[(q * (KG - 1) + (k < q % KG ? k : k - 1)) * 32 + lane];
        part[0] = v.x, part[1] = v.y, part[2] = v.z, part[3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += part[i];
    }
    const int channel = ((row_tile * RG + rg) * 2 + brick) * 8 + (lane >> 2);
    const int token = tile * 8 + 2 * (lane & 3);
    if (token < count) store_pair<EPILOGUE, Out>(p, expert, alpha, meta[token], channel, sum[0], sum[2]);
    if (token + 1 < count) store_pair<EPILOGUE, Out>(p, expert, alpha, meta[token + 1], channel, sum[1], sum[3]);
  }
}

template <int RG, int KG, int EPILOGUE, typename Out>
__global__ void __launch_bounds__(kThreads, 1) moe_decode_kernel(const GemmArgs p, int early_weights) {
  static_assert(RG * KG == kConsumerWarps && RG % 2 == 0, "");
  extern __shared__ __align__(128) char smem[];
  const Layout l = make_layout<RG, KG>(p.kblocks, p.max_tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t full = smem_u32(smem + l.barrier_offset), empty = full + 8 * kMaxStages;

  if (threadIdx.x == 0) {
    for (int i = 0; i < l.stages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, kConsumerWarps);
    }
    mbar_init_fence();
  }
  __syncthreads();
  // With early_weights the producer reads the segments before the predecessor is complete: they were written by a kernel that
  // the predecessor's predecessor has waited for (see quads_moe), and weights are constant.
  if (early_weights == 0) {
    grid_dependency_wait();
    grid_dependency_launch();
  }

  constexpr int kTilesPerUnit = RG / 2;  // row tiles of 64
  const int units_per_segment = (p.row_tiles + kTilesPerUnit - 1) / kTilesPerUnit;
  const int64_t units = (int64_t)*(volatile const int*)p.num_segments * units_per_segment;
  const int first = (int)(units * blockIdx.x / gridDim.x), last = (int)(units * (blockIdx.x + 1) / gridDim.x);
  const int steps = p.kblocks / KG;

  if (warp == kConsumerWarps) {  // producer
    if (lane == 0) {
      int slot = 0;
      uint32_t phase = 1;  // a fresh barrier counts as "previous phase complete"
      const uint32_t ring = smem_u32(smem);
      int segment = -1, expert = 0;
      for (int unit = first; unit < last; ++unit) {
        if (unit / units_per_segment != segment) {
          segment = unit / units_per_segment;
          expert = ((volatile const int*)p.segments)[3 * segment];
        }
        const int tile = unit % units_per_segment * kTilesPerUnit;
        const int tiles = min(kTilesPerUnit, p.row_tiles - tile);
        const uint8_t* source = p.weights + ((int64_t)expert * p.row_tiles + tile) * p.kblocks * kBlockBytes;
        for (int it = 0; it < steps; ++it) {
          mbar_wait(empty + 8 * slot, phase);
          mbar_expect_tx(full + 8 * slot, tiles * KG * kBlockBytes);
          for (int i = 0; i < tiles; ++i)
            bulk_copy(ring + slot * kStageBytes + i * KG * kBlockBytes,
                      source + ((int64_t)i * p.kblocks + it * KG) * kBlockBytes, KG * kBlockBytes, full + 8 * slot);
          if (++slot == l.stages) {
            slot = 0;
            phase ^= 1;
          }
        }
      }
    }
    return;
  }

  if (early_weights != 0) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  Consumer c{full, empty, smem_u32(smem), l.stages, 0, 0u, lane};
  TokenMeta* meta = reinterpret_cast<TokenMeta*>(smem + l.meta_offset);
  int segment = -1, expert = 0, count = 0;
  for (int unit = first; unit < last; ++unit) {
    if (unit / units_per_segment != segment) {
      segment = unit / units_per_segment;
      expert = p.segments[3 * segment];
      const int start = p.segments[3 * segment + 1];
      count = p.segments[3 * segment + 2];
      named_barrier(kAllConsumers, 32 * kConsumerWarps);  // nobody reads the previous segment's tokens any more
      for (int token = warp; token < count; token += kConsumerWarps) {
        const TokenMeta t = load_token(p, start + token);
        if (lane == 0) meta[token] = t;
        const __half* row = p.operand + (int64_t)(t.pair / p.row_divisor) * p.ldb;
        const uint32_t target = smem_u32(smem + l.operand_offset) + token * l.operand_stride;
        for (int i = lane; i < p.kblocks * 8; i += 32) cp_async16(target + i * 16, row + i * 8);
      }
      cp_async_commit();
      cp_async_wait<0>();
      named_barrier(kAllConsumers, 32 * kConsumerWarps);
    }
    const int row_tile = unit % units_per_segment;
    const int rg = warp % RG, kg = warp / RG, buffer = unit & 1;
    switch ((count + 7) / 8) {
      case 1: compute_unit<RG, KG, 1, EPILOGUE, Out>(p, l, c, smem, expert, row_tile, count, rg, kg, buffer); break;
      case 2: compute_unit<RG, KG, 2, EPILOGUE, Out>(p, l, c, smem, expert, row_tile, count, rg, kg, buffer); break;
      case 3: compute_unit<RG, KG, 3, EPILOGUE, Out>(p, l, c, smem, expert, row_tile, count, rg, kg, buffer); break;
      default: compute_unit<RG, KG, 4, EPILOGUE, Out>(p, l, c, smem, expert, row_tile, count, rg, kg, buffer); break;
    }
  }
}

template <int RG, int KG, int EPILOGUE, typename Out>
int launch_decode(const GemmArgs& p, int early_weights, cudaStream_t stream) {
  const Layout l = make_layout<RG, KG>(p.kblocks, p.max_tokens);
  if (l.stages < 3 || p.kblocks % KG != 0 || p.max_tokens % 8 != 0 || p.max_tokens > 8 * kMaxTiles)
    return cudaErrorInvalidValue;
  constexpr auto kernel = moe_decode_kernel<RG, KG, EPILOGUE, Out>;
  cudaError_t e = allow_shared_memory<kernel>(kSmemLimit);
  if (e != cudaSuccess) return e;
  return launch(kernel, dim3(multiprocessors()), dim3(kThreads), l.total, stream, p, early_weights);
}

template <int EPILOGUE, typename Out>
int launch_decode_shape(const GemmArgs& p, int k_groups, int early_weights, cudaStream_t stream) {
  if (k_groups == 2) return launch_decode<4, 2, EPILOGUE, Out>(p, early_weights, stream);
  if (k_groups == 4) return launch_decode<2, 4, EPILOGUE, Out>(p, early_weights, stream);
  if (k_groups == 1) return launch_decode<8, 1, EPILOGUE, Out>(p, early_weights, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace quads

// out_dtype: 0 bfloat16, 1 float16, 2 float32. epilogue: 0 SwiGLU, 1 plain.
extern "C" int quads_moe_decode(const quads::GemmArgs* args, int epilogue, int out_dtype, int k_groups,
                                int early_weights, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (epilogue == kSwiGlu) {
    if (out_dtype == 0) return launch_decode_shape<kSwiGlu, __nv_bfloat16>(*args, k_groups, early_weights, s);
    if (out_dtype == 1) return launch_decode_shape<kSwiGlu, __half>(*args, k_groups, early_weights, s);
  } else {
    if (out_dtype == 0) return launch_decode_shape<kPlain, __nv_bfloat16>(*args, k_groups, early_weights, s);
    if (out_dtype == 1) return launch_decode_shape<kPlain, __half>(*args, k_groups, early_weights, s);
    if (out_dtype == 2) return launch_decode_shape<kPlain, float>(*args, k_groups, early_weights, s);
  }
  return cudaErrorInvalidValue;
}

// Largest segment capacity (8, 16, 24, 32 tokens; 0 if none fits) for an operand of `kblocks` 64-wide blocks.
extern "C" int quads_moe_decode_capacity(int kblocks, int k_groups) {
  using namespace quads;
  for (int tokens = 8 * kMaxTiles; tokens > 0; tokens -= 8) {
    const Layout l = k_groups == 1   ? make_layout<8, 1>(kblocks, tokens)
                     : k_groups == 2 ? make_layout<4, 2>(kblocks, tokens)
                                     : make_layout<2, 4>(kblocks, tokens);
    if (l.stages >= 5) return tokens;
  }
  return 0;
}
