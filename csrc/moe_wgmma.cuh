// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM on wgmma, weights decoded in registers as in moe_decode.cu, tokens streamed along K with them: any K, 8 to 160
// tokens of an expert at a time. Two instances: moe_batch.cu (medium token counts, bound by the weight bytes: many warps that
// decode) and moe_prefill.cu (large ones, bound by the tensor cores: many accumulators).
//
// Persistent; a unit is 64 RG RT weight rows x one segment. RG x KG consumer warpgroups of 64 RT rows each and one producer:
//   - a producer thread feeds the weight ring (RG x KG x RT blocks a stage) with bulk copies, all 128 gather the
//     tokens' rows with cp.async into the 128-byte swizzle that wgmma reads;
//   - a consumer decodes A fragments in registers (the layout of moe_decode.cu is also that of wgmma's A operand) while the
//     previous step's wgmma runs;
//   - consumers that share rows take K blocks in turn and add their accumulators in a fixed order, so results do not depend on the
//     run, on the other tokens of the batch, or on which block computed them.
#pragma once

#include "moe_params.cuh"
#include "wgmma.cuh"

namespace quads {

// Row groups, K groups, row tiles (of 64) of a consumer, and the most tokens of a segment.
template <int RG_, int KG_, int RT_, int TOKENS_>
struct WgmmaShape {
  static constexpr int RG = RG_, KG = KG_, RT = RT_, TOKENS = TOKENS_;
  static constexpr int kConsumers = RG * KG;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kTiles = RT * RG;  // row tiles of a unit
  static constexpr int kMaxStages = 12;
  static constexpr int kLag = 3;  // stages a producer's cp.async groups stay in flight
  // A unit may have a single stage, which arrives kLag stages later: so many units the producer has to be ahead.
  static constexpr int kMetaBuffers = kLag + 1;
  static constexpr int kMinStages = kLag + 2;
  // Registers: of each multiprocessor sub-partition's 16384, one warp of every warpgroup takes its share.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : kConsumers == 3 ? 160 : 112;
  static constexpr int kMinTokens = TOKENS > 64 ? 32 : 8;  // of the narrowest instruction
  // Instructions of 8 tokens more each where decoding bounds, of 16 where the tensor cores do: a multiple of 8 is no faster there.
  static constexpr int kWide = TOKENS > 64 ? 32 : TOKENS;  // up to here in steps of 8
  static __device__ constexpr bool has(int width) { return width >= kMinTokens && width <= TOKENS && (width <= kWide || width % 16 == 0); }
  static __device__ constexpr int narrower(int width) { return width > kWide ? width - 16 : width - 8; }
  // K blocks between two drains of the tensor cores, with one wgmma group in flight until then; 1: drained at every step. ptxas
  // serializes every wgmma if one is in flight where the loop ends.
  static constexpr int kUnroll = kConsumers == 2 && KG == 1 ? 2 : 1;
  using Weights = WeightStream<kTiles, KG>;

  struct UnitMeta {
    SegmentMeta segment;
    TokenMeta tokens[TOKENS];
  };

  struct Layout {
    int stages;
    int operand_bytes;  // of a stage
    int weight_offset, reduce_offset, meta_offset, barrier_offset, total;
  };

  static __host__ __device__ __forceinline__ Layout layout(int max_tokens) {
    constexpr int kLimit = 232448 - 1024;  // 1024: alignment of the base
    Layout l;
    l.operand_bytes = KG * max_tokens * 128;
    const int reduce = RG * (KG - 1) * (max_tokens / 8) * RT * 2048;
    const int rest = reduce + kMetaBuffers * (int)sizeof(UnitMeta) + 8 * (3 * kMaxStages + 2 * kMetaBuffers) + 32;
    const int stages = (kLimit - rest) / (l.operand_bytes + Weights::kBytes);
    l.stages = stages > kMaxStages ? kMaxStages : stages;
    l.weight_offset = l.stages * l.operand_bytes;
    l.reduce_offset = l.weight_offset + l.stages * Weights::kBytes;
    l.meta_offset = l.reduce_offset + reduce;
    l.barrier_offset = (l.meta_offset + kMetaBuffers * (int)sizeof(UnitMeta) + 15) / 16 * 16;
    l.total = l.barrier_offset + 8 * (3 * kMaxStages + 2 * kMetaBuffers) + 1024;
    return l;
  }
};

// Units of a thread block, in turn. Segments come in descending order of their tokens (scan_experts), so every other round runs
// backwards: a block with large units in one round gets small ones in the next.
struct Units {
  int unit = blockIdx.x, first = 0;
  __device__ __forceinline__ void next() {
    first += gridDim.x;
    unit = 2 * first - 1 - unit;
  }
};

struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int size) {
    if (++slot == size) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Barriers {
  uint32_t weights, operand, empty, meta_full, meta_empty;
};

template <typename Shape, int N, int EPILOGUE, typename Out>
__device__ __forceinline__ void compute_unit(const GemmArgs& p, const Shifts& shift, const typename Shape::Layout& l,
                                             const Barriers& bar, Ring& ring, char* smem, uint32_t base,
                                             const typename Shape::UnitMeta& meta, int first_tile, int split, int rg,
                                             int kg) {
  constexpr int KG = Shape::KG, RT = Shape::RT;
  using Weights = typename Shape::Weights;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  constexpr int kWidth = EPILOGUE == kSwiGlu ? 1 : 2;  // adjacent output channels of a row tile
  const int channel = channel_of<EPILOGUE>(first_tile + rg * RT, warp, lane >> 2);
  float2 bias[RT];  // of this thread's rows in each row tile; fetched here, used after the main loop
#pragma unroll
  for (int i = 0; i < RT; ++i)
    bias[i] = load_bias<EPILOGUE>(p, split == 0 ? p.bias : nullptr, meta.segment.expert, channel + i * kWidth);
  float acc[RT][N / 2];
#pragma unroll
  for (int i = 0; i < RT; ++i)
#pragma unroll
    for (int j = 0; j < N / 2; ++j) acc[i][j] = 0.0f;
  const uint32_t block = base + l.weight_offset + Weights::offset(p, first_tile, rg * RT, kg);
  const uint32_t code_offset = block + warp * 512 + lane * 16;
  const uint32_t scale_offset = block + kScaleOffset + warp * 64 + (lane >> 2) * 8;
  const uint32_t operand = base + kg * (l.operand_bytes / KG);

  uint4 codes[RT];
  uint2 scales[RT];
  uint32_t a[2][RT][4];  // [k-step parity][row tile][register]
  const auto load = [&] {
    mbar_wait(bar.weights + 8 * ring.slot, ring.phase);
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      const uint32_t at = ring.slot * Weights::kBytes + i * kBlockBytes;
      load_shared(at + code_offset, codes[i]);
      load_shared(at + scale_offset, scales[i]);
    }
  };
#define QUADS_DECODE(KSTEP)        \
  _Pragma("unroll") for (int i = 0; i < RT; ++i) \
      decode_word(word_of(codes[i], KSTEP), decode_scales<KSTEP>(scales[i]), shift, a[(KSTEP) & 1][i])
#define QUADS_MULTIPLY(KSTEP)                                                                            \
  {                                                                                                      \
    wgmma_fence();                                                                                       \
    _Pragma("unroll") for (int i = 0; i < RT; ++i) wgmma<N>(acc[i], a[(KSTEP) & 1][i], wgmma_descriptor(tile_at, KSTEP)); \
    wgmma_commit();                                                                                      \
  }

#define QUADS_STEP(KSTEP)                    \
  {                                          \
    QUADS_DECODE(KSTEP);                     \
    if constexpr (!kDeep) wgmma_wait<0>();   \
    QUADS_MULTIPLY(KSTEP)                    \
    if constexpr (kDeep) wgmma_wait<1>();    \
  }

  // A step's fragments are decoded while the tensor cores run the step before, the first of a stage while the last of the stage
  // before runs.
  constexpr bool kDeep = Shape::kUnroll > 1;
  const int steps = p.kblocks / KG / p.splits;
  load();
  QUADS_DECODE(0);
  for (int it = 0; it < steps; it += Shape::kUnroll) {
    uint32_t read = 0;  // barrier of the slot that the steps in flight read
#pragma unroll
    for (int i = 0; i < Shape::kUnroll; ++i) {
      mbar_wait(bar.operand + 8 * ring.slot, ring.phase);
      const uint32_t tile_at = operand + ring.slot * l.operand_bytes;
      QUADS_MULTIPLY(0)
      if (i > 0) {
        wgmma_wait<1>();
        if (thread == 0) mbar_arrive(read);
      }
      read = bar.empty + 8 * ring.slot;
      QUADS_STEP(1)
      QUADS_STEP(2)
      QUADS_STEP(3)
      ring.next(l.stages);
      if (i + 1 < Shape::kUnroll || it + Shape::kUnroll < steps) {
        load();
        QUADS_DECODE(0);
      }
    }
    wgmma_wait<0>();
    if (thread == 0) mbar_arrive(read);
  }
#undef QUADS_STEP
#undef QUADS_DECODE
#undef QUADS_MULTIPLY

  // Tokens 8 j .. 8 j + 7 are finished by K group j % KG, summed in the order of the K groups.
  if (KG > 1) {
    // A part of its own for each row group, whatever N: a group may be a unit, of fewer tokens, ahead of the other.
    float4* reduce = reinterpret_cast<float4*>(smem + l.reduce_offset) + rg * (KG - 1) * (p.max_tokens / 8) * RT * 128 + thread;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int owner = j % KG;
      if (kg == owner) continue;
#pragma unroll
      for (int i = 0; i < RT; ++i)
        reduce[((j * (KG - 1) + (kg < owner ? kg : kg - 1)) * RT + i) * 128] =
            make_float4(acc[i][4 * j], acc[i][4 * j + 1], acc[i][4 * j + 2], acc[i][4 * j + 3]);
    }
    named_barrier(1 + rg, 128 * KG);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (kg != j % KG) continue;
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < KG; ++k) {
          if (k == j % KG) {
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[r] += acc[i][4 * j + r];
          } else {
            const float4 v = reduce[((j * (KG - 1) + (k < j % KG ? k : k - 1)) * RT + i) * 128];
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
          }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[i][4 * j + r] = sum[r];
      }
    }
  }

  // Computed for every token of the tile, stored for those that exist: without branches the chains of all tokens overlap.
  Out* const out = reinterpret_cast<Out*>(p.out) + channel + (int64_t)split * p.ldo;
  const int count = channel < p.channels ? meta.segment.count : 0;
  float2 alpha[RT];
#pragma unroll
  for (int i = 0; i < RT; ++i) alpha[i] = channel_alpha<EPILOGUE>(p, meta.segment, channel + i * kWidth);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    if (KG > 1 && kg != j % KG) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 8 * j + 2 * (lane & 3) + half;
      const TokenMeta t = meta.tokens[token];
      float v[RT * kWidth];
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        const float2 scale = make_float2(alpha[i].x * t.decode, alpha[i].y * t.decode);
        const float2 y = finish<EPILOGUE>(acc[i][4 * j + half], acc[i][4 * j + half + 2], scale, bias[i], t.router);
        v[kWidth * i] = y.x;
        if (EPILOGUE == kPlain) v[kWidth * i + kWidth - 1] = y.y;
      }
      if (token < count) store_adjacent<RT * kWidth>(out + t.row, v);
    }
  }
}

template <typename Shape, int EPILOGUE, typename Out>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    moe_wgmma_kernel(const GemmArgs p, const typename Shape::Layout l, const Shifts shift, const int early_weights) {
  using UnitMeta = typename Shape::UnitMeta;
  constexpr int kMaxStages = Shape::kMaxStages, kMetaBuffers = Shape::kMetaBuffers, kLag = Shape::kLag, KG = Shape::KG;
  constexpr int kTiles = Shape::kTiles;
  extern __shared__ char raw_smem[];
  const uint32_t raw = smem_u32(raw_smem);
  const uint32_t base = (raw + 1023u) & ~1023u;
  char* smem = raw_smem + (base - raw);
  const uint32_t barriers = base + l.barrier_offset;
  const Barriers bar{barriers, barriers + 8 * kMaxStages, barriers + 16 * kMaxStages, barriers + 24 * kMaxStages,
                     barriers + 24 * kMaxStages + 8 * kMetaBuffers};
  UnitMeta* meta = reinterpret_cast<UnitMeta*>(smem + l.meta_offset);

  if (threadIdx.x == 0) {
    for (int i = 0; i < l.stages; ++i) {
      mbar_init(bar.weights + 8 * i, 1);
      mbar_init(bar.operand + 8 * i, 128);
      mbar_init(bar.empty + 8 * i, Shape::kConsumers);
    }
    for (int i = 0; i < kMetaBuffers; ++i) {
      mbar_init(bar.meta_full + 8 * i, 128);
      mbar_init(bar.meta_empty + 8 * i, Shape::kConsumers);
    }
    mbar_init_fence();
  }
  __syncthreads();

  // units of a segment: for each row range the parts of K
  const int units_per_segment = (p.row_tiles + kTiles - 1) / kTiles * p.splits;
  const int steps = p.kblocks / KG / p.splits;
  int prefetched = 0;  // stages of the first unit whose weights are on their way already
  if (early_weights != 0 && threadIdx.x == 0 && (int)blockIdx.x < num_segments(p) * units_per_segment) {
    // Before the predecessor is complete: the segments were written by a kernel that the predecessor's predecessor has waited for
    // (see quads_moe), and weights are constant.
    const int within = blockIdx.x % units_per_segment;
    typename Shape::Weights stream(p, expert_of(p, blockIdx.x / units_per_segment), within / p.splits * kTiles,
                                   within % p.splits * steps);
    for (; prefetched < min(l.stages, steps); ++prefetched)
      stream.next(base + l.weight_offset + prefetched * Shape::Weights::kBytes, bar.weights + 8 * prefetched);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const int units = num_segments(p) * units_per_segment;

  if (threadIdx.x < 128) {  // producer warpgroup
    fewer_registers<Shape::kProducerRegisters>();
    static_assert(Shape::TOKENS % 16 == 0, "");
    constexpr int kRows = Shape::TOKENS / 16;  // of a thread
    const int tid = threadIdx.x, chunk = tid % 8, first_row = tid / 8;
    Ring ring;
    int meta_slot = 0;
    uint32_t meta_phase = 1;
    uint32_t pending[kLag];  // slots whose cp.async groups are still in flight, oldest first
    int in_flight = 0;
#pragma unroll
    for (int i = 0; i < kLag; ++i) pending[i] = 0;
    for (Units u; u.unit < units; u.next()) {
      const int unit = u.unit, index = unit / units_per_segment, within = unit % units_per_segment;
      const int first_step = within % p.splits * steps;
      const Segment segment = segment_of(p, index);
      typename Shape::Weights stream(p, segment.expert, within / p.splits * kTiles, first_step);
      int rows[kRows];  // operand offset of this thread's tokens in 16 bytes, -1 past the segment
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int token = first_row + 16 * i;
        rows[i] = token < segment.count ? pair_of(p, segment.start + token) / p.row_divisor * (p.ldb / 8) + chunk : -1;
      }
      mbar_wait(bar.meta_empty + 8 * meta_slot, meta_phase);
      // no loop: the other shapes' producers have no registers for one
      if (tid < segment.count) meta[meta_slot].tokens[tid] = load_token(p, pair_of(p, segment.start + tid));
      if (Shape::TOKENS > 128 && tid + 128 < segment.count)
        meta[meta_slot].tokens[tid + 128] = load_token(p, pair_of(p, segment.start + tid + 128));
      if (tid == 0) meta[meta_slot].segment = load_segment(p, segment);
      mbar_arrive(bar.meta_full + 8 * meta_slot);
      if (++meta_slot == kMetaBuffers) {
        meta_slot = 0;
        meta_phase ^= 1;
      }
      for (int it = 0; it < steps; ++it) {
        mbar_wait(bar.empty + 8 * ring.slot, ring.phase ^ 1);
        if (tid == 0) {
          if (prefetched > 0) {
            --prefetched;
            if (prefetched == 0) stream.skip(it + 1);
          } else {
            stream.next(base + l.weight_offset + ring.slot * Shape::Weights::kBytes, bar.weights + 8 * ring.slot);
          }
        }
        const uint32_t target = base + ring.slot * l.operand_bytes + first_row * 128 + ((chunk ^ (first_row & 7)) * 16);
        const __half* source = p.operand + (first_step + it) * (64 * KG);
#pragma unroll
        for (int kg = 0; kg < KG; ++kg)
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            if (rows[i] >= 0)
              cp_async16(target + kg * (l.operand_bytes / KG) + i * 2048, source + (int64_t)rows[i] * 8 + kg * 64);
        cp_async_commit();
        if (in_flight == kLag) {
          cp_async_wait<kLag>();
          fence_proxy_async();
          mbar_arrive(bar.operand + 8 * pending[0]);
        } else {
          ++in_flight;
        }
#pragma unroll
        for (int i = 0; i + 1 < kLag; ++i) pending[i] = pending[i + 1];
        pending[kLag - 1] = ring.slot;
        ring.next(l.stages);
      }
    }
    cp_async_wait<0>();
    fence_proxy_async();
#pragma unroll
    for (int i = 0; i < kLag; ++i)
      if (i >= kLag - in_flight) mbar_arrive(bar.operand + 8 * pending[i]);
    return;
  }

  more_registers<Shape::kConsumerRegisters>();
  const int consumer = threadIdx.x / 128 - 1, rg = consumer % Shape::RG;
  const int kg = KG == 1 ? 0 : __shfl_sync(0xFFFFFFFFu, consumer / Shape::RG, 0);
  Ring ring;
  int meta_slot = 0;
  uint32_t meta_phase = 0;
  for (Units u; u.unit < units; u.next()) {
    const int unit = u.unit, within = unit % units_per_segment, tile = within / p.splits * kTiles, split = within % p.splits;
    mbar_wait(bar.meta_full + 8 * meta_slot, meta_phase);
    const int tokens = meta[meta_slot].segment.count;
    // The narrowest instruction that holds them; for many accumulators it does not pay to have the narrow ones too.
#define QUADS_TOKENS(N)                                                                 \
  if constexpr (Shape::has(N))                                                          \
    if (tokens <= N && (N == Shape::kMinTokens || tokens > Shape::narrower(N)))         \
      compute_unit<Shape, N, EPILOGUE, Out>(p, shift, l, bar, ring, smem, base, meta[meta_slot], tile, split, rg, kg);
    QUADS_TOKENS(8)
    QUADS_TOKENS(16)
    QUADS_TOKENS(24)
    QUADS_TOKENS(32)
    QUADS_TOKENS(40)
    QUADS_TOKENS(48)
    QUADS_TOKENS(56)
    QUADS_TOKENS(64)
    QUADS_TOKENS(80)
    QUADS_TOKENS(96)
    QUADS_TOKENS(112)
    QUADS_TOKENS(128)
    QUADS_TOKENS(144)
    QUADS_TOKENS(160)
#undef QUADS_TOKENS
    named_barrier(1 + rg, 128 * KG);
    if (threadIdx.x % 128 == 0) mbar_arrive(bar.meta_empty + 8 * meta_slot);
    if (++meta_slot == kMetaBuffers) {
      meta_slot = 0;
      meta_phase ^= 1;
    }
  }
}

template <typename Shape, int EPILOGUE, typename Out>
int launch_wgmma(const GemmArgs& p, int early_weights, cudaStream_t stream) {
  const typename Shape::Layout l = Shape::layout(p.max_tokens);
  if (p.max_tokens > Shape::TOKENS || p.max_tokens % 8 != 0 || p.row_tiles % 2 != 0 || p.splits < 1 ||
      p.kblocks % (Shape::KG * Shape::kUnroll * p.splits) != 0 || (EPILOGUE == kSwiGlu && p.splits != 1) || l.stages < Shape::kMinStages)
    return cudaErrorInvalidValue;
  constexpr auto kernel = moe_wgmma_kernel<Shape, EPILOGUE, Out>;
  cudaError_t e = allow_shared_memory<kernel>(232448);
  if (e != cudaSuccess) return e;
  return launch(kernel, dim3(multiprocessors()), dim3(Shape::kThreads), l.total, stream, p, l, Shifts(), early_weights);
}

// out_dtype: 0 bfloat16, 1 float16, 2 float32. epilogue: 0 SwiGLU, 1 plain.
template <typename Shape>
int launch_wgmma(const GemmArgs& p, int epilogue, int out_dtype, int early_weights, cudaStream_t s) {
  if (epilogue == kSwiGlu) {
    if (out_dtype == 0) return launch_wgmma<Shape, kSwiGlu, __nv_bfloat16>(p, early_weights, s);
    if (out_dtype == 1) return launch_wgmma<Shape, kSwiGlu, __half>(p, early_weights, s);
  } else {
    if (out_dtype == 0) return launch_wgmma<Shape, kPlain, __nv_bfloat16>(p, early_weights, s);
    if (out_dtype == 1) return launch_wgmma<Shape, kPlain, __half>(p, early_weights, s);
    if (out_dtype == 2) return launch_wgmma<Shape, kPlain, float>(p, early_weights, s);
  }
  return cudaErrorInvalidValue;
}

}  // namespace quads
