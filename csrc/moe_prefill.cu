// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for large token counts, same weights and epilogues as moe_decode.cu, bound by the tensor cores.
//
// Persistent; a unit is 256 weight rows x up to 128 tokens of one expert. Three warpgroups:
//   - one producer: a thread feeds the weight ring (9216 bytes per 64 k) with bulk copies, all 128 threads gather the
//     tokens' rows with cp.async into the 128-byte swizzle that wgmma reads;
//   - two consumers of 128 rows each: A fragments are decoded in registers (the layout of moe_decode.cu is also that of
//     wgmma's A operand) while the previous step's wgmma runs.
#include "moe_params.cuh"
#include "wgmma.cuh"

namespace quads {
namespace {

constexpr int kTokens = 128;

struct UnitMeta {
  SegmentMeta segment;
  TokenMeta tokens[kTokens];
};

constexpr int kThreads = 384;
constexpr int kTilesPerUnit = kGroupTiles;
constexpr int kStages = 8;
constexpr int kMetaBuffers = 2;
constexpr int kLag = 3;  // stages a producer's cp.async groups stay in flight
constexpr int kWeightBytes = kTilesPerUnit * kBlockBytes;
constexpr int kOperandBytes = kTokens * 128;
constexpr int kOperandOffset = 0;
constexpr int kWeightOffset = kStages * kOperandBytes;
constexpr int kMetaOffset = kWeightOffset + kStages * kWeightBytes;
constexpr int kBarrierOffset = (kMetaOffset + kMetaBuffers * (int)sizeof(UnitMeta) + 15) / 16 * 16;
constexpr int kSmemBytes = kBarrierOffset + 8 * (3 * kStages + 2 * kMetaBuffers) + 1024;  // 1024: alignment of the base
static_assert(kSmemBytes <= 232448, "");

struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Barriers {
  uint32_t weights, operand, empty, meta_full, meta_empty;
};

template <int N, int EPILOGUE, typename Out>
__device__ __forceinline__ void compute_unit(const GemmArgs& p, const Shifts& shift, const Barriers& bar, Ring& ring,
                                             uint32_t base, const UnitMeta& meta, int segment, int tile, int group) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int channel = channel_of<EPILOGUE>(tile + group * 2, warp, lane >> 2);
  float2 bias[2];  // of this thread's rows in the two row tiles; fetched here, used after the main loop
#pragma unroll
  for (int i = 0; i < 2; ++i)
    bias[i] = load_bias<EPILOGUE>(p, segment, channel + (EPILOGUE == kSwiGlu ? i : 2 * i));
  float acc[2][N / 2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < N / 2; ++j) acc[i][j] = 0.0f;
  const uint32_t code_offset = kWeightOffset + group * 2 * kBlockBytes + warp * 512 + lane * 16;
  const uint32_t scale_offset = kWeightOffset + group * 2 * kBlockBytes + kScaleOffset + warp * 64 + (lane >> 2) * 8;

  uint32_t a[2][2][4];  // [k-step parity][row tile][register]
  int previous = -1;
  for (int it = 0; it < p.kblocks; ++it) {
    mbar_wait(bar.weights + 8 * ring.slot, ring.phase);
    uint4 codes[2];
    uint2 scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = base + ring.slot * kWeightBytes + i * kBlockBytes;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes[i].x), "=r"(codes[i].y), "=r"(codes[i].z), "=r"(codes[i].w)
                   : "r"(at + code_offset)
                   : "memory");
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(scales[i].x), "=r"(scales[i].y)
                   : "r"(at + scale_offset)
                   : "memory");
    }
    mbar_wait(bar.operand + 8 * ring.slot, ring.phase);
    const uint64_t descriptor = wgmma_descriptor(base + kOperandOffset + ring.slot * kOperandBytes);
#define QUADS_STEP(KSTEP)                                                                       \
  {                                                                                             \
    decode_word(word_of(codes[0], KSTEP), decode_scales<KSTEP>(scales[0]), shift, a[(KSTEP) & 1][0]);  \
    decode_word(word_of(codes[1], KSTEP), decode_scales<KSTEP>(scales[1]), shift, a[(KSTEP) & 1][1]);  \
    wgmma_fence();                                                                              \
    wgmma<N>(acc[0], a[(KSTEP) & 1][0], descriptor + 2 * (KSTEP));                              \
    wgmma<N>(acc[1], a[(KSTEP) & 1][1], descriptor + 2 * (KSTEP));                              \
    wgmma_commit();                                                                             \
    wgmma_wait<1>();                                                                            \
  }
    QUADS_STEP(0)
    if (previous >= 0 && threadIdx.x % 128 == 0) mbar_arrive(bar.empty + 8 * previous);
    QUADS_STEP(1)
    QUADS_STEP(2)
    QUADS_STEP(3)
#undef QUADS_STEP
    previous = ring.slot;
    ring.next();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 128 == 0) mbar_arrive(bar.empty + 8 * previous);

  // Computed for every token of the tile, stored for those that exist: without branches the chains of all tokens overlap.
  Out* const out = reinterpret_cast<Out*>(p.out) + channel;
  const int count = channel < p.channels ? meta.segment.count : 0;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 8 * j + 2 * (lane & 3) + half;
      const TokenMeta t = meta.tokens[token];
      const float2 scale = make_float2(meta.segment.alpha.x * t.decode, meta.segment.alpha.y * t.decode);
      const float2 a = finish<EPILOGUE>(acc[0][4 * j + half], acc[0][4 * j + half + 2], scale, bias[0], t.router);
      const float2 b = finish<EPILOGUE>(acc[1][4 * j + half], acc[1][4 * j + half + 2], scale, bias[1], t.router);
      if (EPILOGUE == kSwiGlu) {
        const float v[2] = {a.x, b.x};
        if (token < count) store_adjacent<2>(out + t.row, v);
      } else {
        const float v[4] = {a.x, a.y, b.x, b.y};
        if (token < count) store_adjacent<4>(out + t.row, v);
      }
    }
  }
}

template <int EPILOGUE, typename Out>
__global__ void __launch_bounds__(kThreads, 1) moe_prefill_kernel(const GemmArgs p, const Shifts shift) {
  extern __shared__ char raw_smem[];
  const uint32_t raw = smem_u32(raw_smem);
  const uint32_t base = (raw + 1023u) & ~1023u;
  char* smem = raw_smem + (base - raw);
  const uint32_t barriers = base + kBarrierOffset;
  const Barriers bar{barriers, barriers + 8 * kStages, barriers + 16 * kStages, barriers + 24 * kStages,
                     barriers + 24 * kStages + 8 * kMetaBuffers};
  UnitMeta* meta = reinterpret_cast<UnitMeta*>(smem + kMetaOffset);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(bar.weights + 8 * i, 1);
      mbar_init(bar.operand + 8 * i, 128);
      mbar_init(bar.empty + 8 * i, 2);
    }
    for (int i = 0; i < kMetaBuffers; ++i) {
      mbar_init(bar.meta_full + 8 * i, 128);
      mbar_init(bar.meta_empty + 8 * i, 2);
    }
    mbar_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();

  const int units_per_segment = (p.row_tiles + kTilesPerUnit - 1) / kTilesPerUnit;
  const int units = *p.num_segments * units_per_segment;

  if (threadIdx.x < 128) {  // producer warpgroup
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int tid = threadIdx.x, chunk = tid % 8, first_row = tid / 8;
    Ring ring;
    int meta_slot = 0;
    uint32_t meta_phase = 1;
    uint32_t pending[kLag];  // slots whose cp.async groups are still in flight, oldest first
    int in_flight = 0;
#pragma unroll
    for (int i = 0; i < kLag; ++i) pending[i] = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int segment = unit / units_per_segment, tile = unit % units_per_segment * kTilesPerUnit;
      const int expert = p.segments[3 * segment], start = p.segments[3 * segment + 1], count = p.segments[3 * segment + 2];
      const WeightGroup weights(p.weights, expert, p.row_tiles, p.kblocks, tile);
      int rows[8];  // operand row of this thread's tokens, -1 past the segment
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = first_row + 16 * i;
        rows[i] = token < count ? p.sorted[start + token] / p.row_divisor : -1;
      }
      mbar_wait(bar.meta_empty + 8 * meta_slot, meta_phase);
      if (tid < count) meta[meta_slot].tokens[tid] = load_token(p, p.sorted[start + tid]);
      if (tid == 0) meta[meta_slot].segment = load_segment(p, segment);
      mbar_arrive(bar.meta_full + 8 * meta_slot);
      if (++meta_slot == kMetaBuffers) {
        meta_slot = 0;
        meta_phase ^= 1;
      }
      for (int it = 0; it < p.kblocks; ++it) {
        mbar_wait(bar.empty + 8 * ring.slot, ring.phase ^ 1);
        if (tid == 0) {
          const uint32_t bytes = weights.tiles * kBlockBytes;
          mbar_expect_tx(bar.weights + 8 * ring.slot, bytes);
          bulk_copy(base + kWeightOffset + ring.slot * kWeightBytes, weights.blocks + (int64_t)it * bytes, bytes,
                    bar.weights + 8 * ring.slot);
        }
        const uint32_t target = base + kOperandOffset + ring.slot * kOperandBytes + ((chunk ^ (first_row & 7)) * 16);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (rows[i] >= 0)
            cp_async16(target + (first_row + 16 * i) * 128, p.operand + (int64_t)rows[i] * p.ldb + it * 64 + chunk * 8);
        cp_async_commit();
        if (in_flight == kLag) {
          cp_async_wait<kLag>();
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          mbar_arrive(bar.operand + 8 * pending[0]);
        } else {
          ++in_flight;
        }
#pragma unroll
        for (int i = 0; i + 1 < kLag; ++i) pending[i] = pending[i + 1];
        pending[kLag - 1] = ring.slot;
        ring.next();
      }
    }
    cp_async_wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kLag; ++i)
      if (i >= kLag - in_flight) mbar_arrive(bar.operand + 8 * pending[i]);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  const int group = threadIdx.x / 128 - 1;
  Ring ring;
  int meta_slot = 0;
  uint32_t meta_phase = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int tile = unit % units_per_segment * kTilesPerUnit;
    mbar_wait(bar.meta_full + 8 * meta_slot, meta_phase);
#define QUADS_TOKENS(N) compute_unit<N, EPILOGUE, Out>(p, shift, bar, ring, base, meta[meta_slot], unit / units_per_segment, tile, group)
    switch ((meta[meta_slot].segment.count - 1) / 16) {
      case 0:
      case 1: QUADS_TOKENS(32); break;
      case 2: QUADS_TOKENS(48); break;
      case 3: QUADS_TOKENS(64); break;
      case 4: QUADS_TOKENS(80); break;
      case 5: QUADS_TOKENS(96); break;
      case 6: QUADS_TOKENS(112); break;
      default: QUADS_TOKENS(128); break;
    }
#undef QUADS_TOKENS
    named_barrier(1 + group, 128);
    if (threadIdx.x % 128 == 0) mbar_arrive(bar.meta_empty + 8 * meta_slot);
    if (++meta_slot == kMetaBuffers) {
      meta_slot = 0;
      meta_phase ^= 1;
    }
  }
}

template <int EPILOGUE, typename Out>
int launch_prefill(const GemmArgs& p, cudaStream_t stream) {
  if (p.max_tokens > kTokens || p.row_tiles % 2 != 0) return cudaErrorInvalidValue;
  constexpr auto kernel = moe_prefill_kernel<EPILOGUE, Out>;
  cudaError_t e = allow_shared_memory<kernel>(kSmemBytes);
  if (e != cudaSuccess) return e;
  return launch(kernel, dim3(multiprocessors()), dim3(kThreads), kSmemBytes, stream, p, Shifts());
}

}  // namespace
}  // namespace quads

// out_dtype: 0 bfloat16, 1 float16, 2 float32. epilogue: 0 SwiGLU, 1 plain.
extern "C" int quads_moe_prefill(const quads::GemmArgs* args, int epilogue, int out_dtype, void* stream) {
  using namespace quads;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (epilogue == kSwiGlu) {
    if (out_dtype == 0) return launch_prefill<kSwiGlu, __nv_bfloat16>(*args, s);
    if (out_dtype == 1) return launch_prefill<kSwiGlu, __half>(*args, s);
  } else {
    if (out_dtype == 0) return launch_prefill<kPlain, __nv_bfloat16>(*args, s);
    if (out_dtype == 1) return launch_prefill<kPlain, __half>(*args, s);
    if (out_dtype == 2) return launch_prefill<kPlain, float>(*args, s);
  }
  return cudaErrorInvalidValue;
}
