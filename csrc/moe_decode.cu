// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for small token counts: y[pair, n] = sum_k W[expert, n, k] * X[row, k], packed NVFP4 weights.
//
// Bound by the weight bytes, so everything serves one continuous stream of them:
//   - persistent: one block per multiprocessor, each with a contiguous share of (segment, row range) units;
//   - one warp only feeds a ring of 18432-byte stages with bulk copies, across units and segments, without a stop;
//   - one warp fetches the tokens of the next segment (up to 32 of one expert, whole K) into the spare one of two buffers;
//   - sixteen warps read their A fragments from the ring (16 bytes a lane, no bank conflict), decode in registers and run
//     mma.m16n8k16 (FP16 in, FP32 accumulate), the tokens being the N dimension in steps of 8;
//   - all row ranges of a segment that this block has are streamed past the tokens, which stay where they are;
//   - warps that share rows split K and add their accumulators in a fixed order, so results do not depend on the run,
//     on the other tokens of the batch, or on which block computed them.
#include "mma.cuh"
#include "moe_params.cuh"

namespace quads {
namespace {

constexpr int kStageBytes = 8 * kBlockBytes;
constexpr int kConsumerWarps = 16;
constexpr int kThreads = 32 * (kConsumerWarps + 2);
constexpr int kMaxStages = 12;
constexpr int kMaxTiles = 4;  // of 8 tokens
constexpr int kSmemLimit = 232448;

struct TokenBuffer {
  SegmentMeta segment;
  int first_row;  // of the segment's tokens in the operand region
  TokenMeta tokens[kMaxTiles * 8];
};

struct Layout {
  int stages;
  int operand_stride;   // bytes; rows are 16 bytes apart modulo 128, so ldmatrix meets no bank conflict
  int reduce_bytes;     // one buffer
  int reduce_buffers;   // 2, or 1 where shared memory is short
  int operand_offset, reduce_offset, meta_offset, barrier_offset, total;
};

template <int RG, int KG>
__host__ __device__ Layout make_layout(int kblocks, int max_tokens) {
  Layout l;
  const int tiles = max_tokens / 8;
  l.operand_stride = kblocks * 128 + 16;
  l.reduce_bytes = RG * 2 * tiles * (KG - 1) * 512;
  l.reduce_buffers = tiles <= 1 ? 2 : 1;
  const int rest = l.reduce_buffers * l.reduce_bytes + 2 * (int)sizeof(TokenBuffer) + 8 * (2 * kMaxStages + 6) + 256;
  const int operand = max_tokens * l.operand_stride;
  const int stages = (kSmemLimit - rest - operand) / kStageBytes;
  l.stages = stages > kMaxStages ? kMaxStages : stages;
  l.operand_offset = l.stages * kStageBytes;
  l.reduce_offset = l.operand_offset + operand;
  l.meta_offset = l.reduce_offset + l.reduce_buffers * l.reduce_bytes;
  l.barrier_offset = (l.meta_offset + 2 * (int)sizeof(TokenBuffer) + 15) / 16 * 16;
  l.total = l.barrier_offset + 8 * (2 * kMaxStages + 6);
  return l;
}

// Weight registers of one warp and stage: 32 rows x 64 k.
struct Fragment {
  uint4 codes[2];
  uint2 scales[2];
};

struct Consumer {
  uint32_t full;        // address of the current stage's full barrier; its empty barrier is 8 * kMaxStages further
  uint32_t stage;       // address of the current stage
  uint32_t first_full;  // the same of stage 0
  uint32_t last_full;   // and of the stage after the last
  uint32_t ring;
  uint32_t phase;
  int lane;

  // A warp's loads are issued before its lane 0 arrives, in program order and by whole warps, so the arrival covers them all.
  __device__ __forceinline__ void load(Fragment& f, uint32_t offset_codes, uint32_t offset_scales) {
    mbar_wait(full, phase);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_shared(stage + offset_codes + i * 512, f.codes[i]);
      load_shared(stage + offset_scales + i * 64, f.scales[i]);
    }
    if (lane == 0) mbar_arrive(full + 8 * kMaxStages);
    full += 8;
    stage += kStageBytes;
    if (full == last_full) {
      full = first_full;
      stage = ring;
      phase ^= 1;
    }
  }
};

template <int NT, int KSTEP>
__device__ __forceinline__ void multiply_step(const Fragment& f, const Shifts& shift, const uint32_t (&b)[NT][4], float (&acc)[2][NT][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4];
    decode_word(word_of(f.codes[i], KSTEP), decode_scales<KSTEP>(f.scales[i]), shift, a);
#pragma unroll
    for (int j = 0; j < NT; ++j) mma(acc[i][j], a, b[j][2 * (KSTEP & 1)], b[j][2 * (KSTEP & 1) + 1]);
  }
}

// One unit: all of K for the rows of this warp, then the sum over the K groups and the epilogue.
template <int RG, int KG, int NT, int EPILOGUE, typename Out>
__device__ __forceinline__ void compute_unit(const GemmArgs& p, const Layout& l, Consumer& c, const Shifts& shift, char* smem,
                                             const TokenBuffer& meta, uint32_t operand, int unit_row, int rg, int kg,
                                             int buffer, int segment,
                                             uint32_t values_full, uint32_t values_phase) {
  const int lane = c.lane;
  const int first_tile = unit_row * (RG / 2), tile = rg >> 1;
  const uint32_t block = WeightStream<RG / 2, KG>::offset(p, first_tile, tile, kg);
  const uint32_t codes = block + (rg & 1) * 1024 + lane * 16;
  const uint32_t scales = block + kScaleOffset + (rg & 1) * 128 + (lane >> 2) * 8;
  operand += (lane & 7) * l.operand_stride + (lane >> 3) * 16 + kg * 128;

  int channel[2];
  float2 bias[2];  // fetched here, used after the main loop
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    channel[i] = channel_of<EPILOGUE>(first_tile + tile, (rg & 1) * 2 + i, lane >> 2);
    bias[i] = load_bias<EPILOGUE>(p, p.bias, p.segments == nullptr ? 0 : p.segments[3 * segment], channel[i]);
  }

  float acc[2][NT][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[i][j][k] = 0.0f;

  const int steps = p.kblocks / KG;
#pragma unroll 1
  for (int it = 0; it < steps; ++it) {
    Fragment f;
    c.load(f, codes, scales);
    uint32_t b[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) ldmatrix_x4(operand + j * 8 * l.operand_stride, b[j]);
    multiply_step<NT, 0>(f, shift, b, acc);
    multiply_step<NT, 1>(f, shift, b, acc);
#pragma unroll
    for (int j = 0; j < NT; ++j) ldmatrix_x4(operand + j * 8 * l.operand_stride + 64, b[j]);
    multiply_step<NT, 2>(f, shift, b, acc);
    multiply_step<NT, 3>(f, shift, b, acc);
    operand += KG * 128;
  }

  // Accumulator group q = (brick, token tile) is finished by K group q % KG, summed in the order of the K groups.
  float4* reduce = reinterpret_cast<float4*>(smem + l.reduce_offset + (l.reduce_buffers == 2 ? buffer : 0) * l.reduce_bytes +
                                             rg * (l.reduce_bytes / RG));
  if (KG > 1) {
#pragma unroll
    for (int q = 0; q < 2 * NT; ++q) {
      const int owner = q % KG;
      const float(&a)[4] = acc[q / NT][q % NT];
      if (kg != owner) reduce[(q * (KG - 1) + (kg < owner ? kg : kg - 1)) * 32 + lane] = make_float4(a[0], a[1], a[2], a[3]);
    }
    named_barrier(1 + rg, 32 * KG);
  }

  mbar_wait(values_full, values_phase);
#pragma unroll
  for (int q = 0; q < 2 * NT; ++q) {
    if (kg != q % KG) continue;
    const int brick = q / NT, tile8 = q % NT;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < KG; ++k) {
      float part[4];
      if (k == q % KG) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = acc[brick][tile8][i];
      } else {
        const float4 v = reduce[(q * (KG - 1) + (k < q % KG ? k : k - 1)) * 32 + lane];
        part[0] = v.x, part[1] = v.y, part[2] = v.z, part[3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += part[i];
    }
    if (channel[brick] >= p.channels) continue;
    const float2 alpha = channel_alpha<EPILOGUE>(p, meta.segment, channel[brick]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = tile8 * 8 + 2 * (lane & 3) + half;
      if (index >= meta.segment.count) continue;
      const TokenMeta t = meta.tokens[index];
      const float2 scale = make_float2(alpha.x * t.decode, alpha.y * t.decode);
      const float2 y = finish<EPILOGUE>(sum[half], sum[half + 2], scale, bias[brick], t.router);
      Out* out = reinterpret_cast<Out*>(p.out) + t.row + channel[brick];
      if (EPILOGUE == kSwiGlu) {
        *out = from_float<Out>(y.x);
      } else {
        const float two[2] = {y.x, y.y};
        store_adjacent<2>(out, two);
      }
    }
  }
  if (KG > 1 && l.reduce_buffers == 1) named_barrier(1 + rg, 32 * KG);
}

template <int RG, int KG, int EPILOGUE, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    moe_decode_kernel(const GemmArgs p, const Shifts shift, const int early_weights) {
  static_assert(RG * KG == kConsumerWarps && RG % 2 == 0, "");
  extern __shared__ __align__(128) char smem[];
  const Layout l = make_layout<RG, KG>(p.kblocks, p.max_tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t full = smem_u32(smem + l.barrier_offset), empty = full + 8 * kMaxStages;
  const uint32_t tokens_full = empty + 8 * kMaxStages, tokens_empty = tokens_full + 16, values_full = tokens_full + 32;
  TokenBuffer* meta = reinterpret_cast<TokenBuffer*>(smem + l.meta_offset);
  const uint32_t operand = smem_u32(smem + l.operand_offset);

  if (threadIdx.x == 0) {
    for (int i = 0; i < l.stages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(tokens_full + 8 * i, 1);
      mbar_init(tokens_empty + 8 * i, kConsumerWarps);
      mbar_init(values_full + 8 * i, 1);
    }
    mbar_init_fence();
  }
  __syncthreads();
  // With early_weights the weight stream starts before the predecessor is complete: the segments were written by a kernel that
  // the predecessor's predecessor has waited for (see quads_moe), and weights are constant.
  if (early_weights == 0) {
    grid_dependency_wait();
    grid_dependency_launch();
  }

  constexpr int kTiles = RG / 2;  // row tiles of a unit
  const int units_per_segment = (p.row_tiles + kTiles - 1) / kTiles;
  const int steps = p.kblocks / KG;  // stages of a unit
  const int64_t units = (int64_t)num_segments(p) * units_per_segment;
  const int first = (int)(units * blockIdx.x / gridDim.x), last = (int)(units * (blockIdx.x + 1) / gridDim.x);

  if (warp == kConsumerWarps) {  // weights
    if (lane == 0) {
      int slot = 0;
      uint32_t phase = 1;  // a fresh barrier counts as "previous phase complete"
      const uint32_t ring = smem_u32(smem);
      int segment = -1, expert = 0;
      for (int unit = first; unit < last; ++unit) {
        if (unit / units_per_segment != segment) {
          segment = unit / units_per_segment;
          expert = expert_of(p, segment);
        }
        WeightStream<kTiles, KG> stream(p, expert, unit % units_per_segment * kTiles);
        for (int it = 0; it < steps; ++it) {
          mbar_wait(empty + 8 * slot, phase);
          stream.next(ring + slot * kStageBytes, full + 8 * slot);
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

  if (warp == kConsumerWarps + 1) {  // tokens
    // Segments alternate between the two ends of the operand region. Two fit together if their rows (in tiles of 8) do;
    // otherwise the newer one waits until the older one is done with.
    int index = 0, previous_rows = 0;
    for (int segment = first / units_per_segment; first < last && segment <= (last - 1) / units_per_segment;
         ++segment, ++index) {
      const int slot = index & 1;
      const Segment s = segment_of(p, segment);
      const int count = s.count;
      const int rows = (count + 7) / 8 * 8;
      const int pair = lane < count ? pair_of(p, s.start + lane) : 0;
      if (index > 1) mbar_wait(tokens_empty + 8 * slot, (index / 2 - 1) & 1);
      if (index > 0 && previous_rows + rows > p.max_tokens) mbar_wait(tokens_empty + 8 * (slot ^ 1), ((index - 1) / 2) & 1);
      previous_rows = rows;
      const int first_row = slot == 0 ? 0 : p.max_tokens - rows;
      if (lane < count)
        bulk_copy(operand + (first_row + lane) * l.operand_stride, p.operand + (int64_t)(pair / p.row_divisor) * p.ldb,
                  p.kblocks * 128, tokens_full + 8 * slot);
      if (lane == 0) {
        meta[slot].first_row = first_row;
        meta[slot].segment.count = count;
        mbar_expect_tx(tokens_full + 8 * slot, count * p.kblocks * 128);
      }
      // needed at the end of the first unit only, hence a barrier of their own
      if (lane < count) meta[slot].tokens[lane] = load_token(p, pair);
      if (lane == 0) {
        const SegmentMeta m = load_segment(p, s);
        meta[slot].segment.expert = m.expert;
        meta[slot].segment.alpha = m.alpha;
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(values_full + 8 * slot);
    }
    return;
  }

  Consumer c{full, smem_u32(smem), full, full + 8 * l.stages, smem_u32(smem), 0u, lane};
  const int rg = warp % RG, kg = warp / RG;
  int segment = -1, index = -1;
  for (int unit = first; unit < last; ++unit) {
    if (unit / units_per_segment != segment) {
      if (segment >= 0) {
        __syncwarp();
        if (lane == 0) mbar_arrive(tokens_empty + 8 * (index & 1));
      }
      segment = unit / units_per_segment;
      ++index;
      mbar_wait(tokens_full + 8 * (index & 1), (index / 2) & 1);
    }
    const TokenBuffer& tokens = meta[index & 1];
    const uint32_t at = operand + tokens.first_row * l.operand_stride;
#define QUADS_UNIT(NT) \
  compute_unit<RG, KG, NT, EPILOGUE, Out>(p, l, c, shift, smem, tokens, at, unit % units_per_segment, rg, kg, unit & 1, segment, \
                                          values_full + 8 * (index & 1), (index / 2) & 1)
    switch ((tokens.segment.count + 7) / 8) {
      case 1: QUADS_UNIT(1); break;
      case 2: QUADS_UNIT(2); break;
      case 3: QUADS_UNIT(3); break;
      default: QUADS_UNIT(4); break;
    }
#undef QUADS_UNIT
  }
}

template <int RG, int KG, int EPILOGUE, typename Out>
int launch_decode(const GemmArgs& p, int early_weights, cudaStream_t stream) {
  const Layout l = make_layout<RG, KG>(p.kblocks, p.max_tokens);
  if (l.stages < 3 || p.kblocks % KG != 0 || p.max_tokens % 8 != 0 || p.max_tokens > 8 * kMaxTiles || p.row_tiles % 2 != 0 ||
      p.splits != 1)
    return cudaErrorInvalidValue;
  constexpr auto kernel = moe_decode_kernel<RG, KG, EPILOGUE, Out>;
  cudaError_t e = allow_shared_memory<kernel>(kSmemLimit);
  if (e != cudaSuccess) return e;
  return launch(kernel, dim3(multiprocessors()), dim3(kThreads), l.total, stream, p, Shifts(), early_weights);
}

template <int EPILOGUE, typename Out>
int launch_decode_shape(const GemmArgs& p, int k_groups, int early_weights, cudaStream_t stream) {
  if (k_groups == 1) return launch_decode<16, 1, EPILOGUE, Out>(p, early_weights, stream);
  if (k_groups == 2) return launch_decode<8, 2, EPILOGUE, Out>(p, early_weights, stream);
  if (k_groups == 4) return launch_decode<4, 4, EPILOGUE, Out>(p, early_weights, stream);
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
    const Layout l = k_groups == 1   ? make_layout<16, 1>(kblocks, tokens)
                     : k_groups == 2 ? make_layout<8, 2>(kblocks, tokens)
                                     : make_layout<4, 4>(kblocks, tokens);
    if (l.stages >= 3) return tokens;
  }
  return 0;
}
