# SPDX-License-Identifier: Apache-2.0
"""W4A4 MoE layer with residual compensation on Hopper: packed NVFP4 weights, exact 16-bit operands, FP32 accumulators.

    prepared = prepare_moe_weights(w13_codes, w13_scales, w13_decode, w2_codes, w2_scales, w2_decode)
    y = quads_moe(x, prepared, topk_weights, topk_ids, compensation=..., four_over_six=...)

Five launches (two more for many pairs), no host synchronisation, CUDA-graph capturable, all with
programmatic dependent launch:

    group pairs by expert + quantize x -> GEMM 1 with SiLU·mul -> quantize h -> GEMM 2 -> sum over top-k

`Wq` stays packed and is decoded in registers. Numerics: operands are q * s (plus the residual of the compensated
blocks), rounded once to FP16 when merged; gate, up and SiLU·mul in FP32, h rounded once to x's dtype; router weights in
FP32. Per-pair outputs are summed over top-k in FP32; with many pairs they are kept in x's dtype in between.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels._native import AlignArgs, GemmArgs, QuantizeArgs
from vllm_quads.kernels.launch import (
    DTYPES,
    PLAIN,
    SWIGLU,
    Operand,
    cast_rows,
    device_limits,
    launch_gemm,
    sum_args,
    sum_rows,
)
from vllm_quads.kernels.layout import K_BLOCK, arrange_into, arranged_shape, padded_k, unarrange
from vllm_quads.kernels.plan import Gemm, LayerShape, plan_layer
from vllm_quads.kernels.statistics import Gathering, launch_statistics, site_args
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE


@dataclass(frozen=True)
class PreparedMoE:
    """The local experts of one layer in the kernels' layout. Buffers keep their addresses over refits (`out=`)."""

    w13: Tensor
    """uint8 [E, blocks, 2304]; see `layout.arrange`."""
    w2: Tensor
    """uint8 [E, blocks, 2304]."""
    w13_decode: Tensor
    """float32 [E, 2]: decode global scales of gate and up."""
    w2_decode: Tensor
    """float32 [E, 2]: the decode global scale of w2, twice."""
    hidden: int
    intermediate: int

    @property
    def num_experts(self) -> int:
        """Local experts E."""
        return self.w13.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in (self.w13, self.w2, self.w13_decode, self.w2_decode))

    def unpack(self, expert: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inverse of the preparation, one expert: w13 codes, w13 block scales, w2 codes, w2 block scales."""
        i, h, part = self.intermediate, self.hidden, slice(expert, expert + 1)
        codes13, scales13 = unarrange(self.w13[part], 2 * i, h, gate_up=True)
        codes2, scales2 = unarrange(self.w2[part], h, i, gate_up=False)
        return codes13[0], scales13[0], codes2[0], scales2[0]


@dataclass(frozen=True)
class MoECompensation:
    """Residual compensation and centring of one layer. Tensors may be updated in place between graph replays."""

    mask13: Tensor | None = None
    """bool or uint8 [H / 16]: blocks of w13's input whose residual is added."""
    mask2: Tensor | None = None
    """bool or uint8 [E, I / 16]: the same for w2's input, per expert."""
    center13: Tensor | None = None
    """float32 [H]: subtracted from w13's input before it is quantized."""
    bias13: Tensor | None = None
    """float32 [E, 2I]: W13 @ center13 (gate rows, then up rows); given together with center13."""
    center13_by_chunk: Tensor | None = None
    """float32 [H]: center13 once more, in the order of `layout.by_chunk`: optional, faster to read."""
    full: Tensor | None = None
    """bool or uint8 [M]: tokens that get the residual of every block (the rows form)."""
    full_all: bool = False
    """Every token gets the residual of every block."""


NO_COMPENSATION = MoECompensation()


def prepare_moe_weights(
    w13_codes: Tensor,
    w13_scales: Tensor,
    w13_decode: Tensor,
    w2_codes: Tensor,
    w2_scales: Tensor,
    w2_decode: Tensor,
    out: PreparedMoE | None = None,
) -> PreparedMoE:
    """Re-arrange the packed weights of one layer for the kernels (bytes move, nothing is re-quantized).

    w13: codes uint8 [E, 2I, H/2] (gate rows, then up rows; low nibble = even k), block scales float8_e4m3fn
    [E, 2I, H/16], decode global scales float32 [E, 2] (or [E]: shared); w2: [E, H, I/2], [E, H, I/16], float32 [E].
    `out` is a preparation of the same shapes to write into, so that captured graphs see the new weights. Raises
    FormatError.
    """
    experts, rows13, half_h = w13_codes.shape
    hidden, intermediate = 2 * half_h, rows13 // 2
    if w2_codes.shape != (experts, hidden, intermediate // 2):
        raise FormatError(
            f"w2 codes have shape {tuple(w2_codes.shape)}, expected {(experts, hidden, intermediate // 2)} "
            f"for w13 codes {tuple(w13_codes.shape)}"
        )
    if hidden % 16 or intermediate % 16:
        raise FormatError(f"hidden {hidden} and intermediate {intermediate} must be multiples of 16 on each rank")
    device = w13_codes.device
    if out is None:
        shape13 = (experts, *arranged_shape(2 * intermediate, hidden))
        shape2 = (experts, *arranged_shape(hidden, intermediate))
        out = PreparedMoE(
            torch.empty(shape13, dtype=torch.uint8, device=device),
            torch.empty(shape2, dtype=torch.uint8, device=device),
            torch.empty(experts, 2, dtype=torch.float32, device=device),
            torch.empty(experts, 2, dtype=torch.float32, device=device),
            hidden,
            intermediate,
        )
    elif (out.num_experts, out.hidden, out.intermediate) != (experts, hidden, intermediate):
        raise FormatError(
            f"out was prepared for {(out.num_experts, out.hidden, out.intermediate)} (experts, hidden, intermediate), "
            f"not for {(experts, hidden, intermediate)}"
        )
    arrange_into(w13_codes, w13_scales, out.w13, gate_up=True)
    arrange_into(w2_codes, w2_scales, out.w2, gate_up=False)
    out.w13_decode.copy_(w13_decode if w13_decode.dim() == 2 else w13_decode[:, None].expand(-1, 2))
    out.w2_decode.copy_(w2_decode[:, None].expand(-1, 2))
    return out


@dataclass(frozen=True)
class Tuning:
    """Kernel choices of the layer; None means what `plan.plan_layer` picks."""

    gemm1: Gemm | None = None
    """Kernel of the first GEMM."""
    gemm2: Gemm | None = None
    """Kernel of the second GEMM."""
    k_groups1: int | None = None
    """Consumers of the first GEMM that share rows and split K: 1, 2 or 4 (units of 512, 256 or 128 rows)."""
    k_groups2: int | None = None
    """The same of the second GEMM."""
    capacity: int | None = None
    """Tokens of one expert that are multiplied at a time, a multiple of 8."""
    splits: int | None = None
    """Parts of the second GEMM's K, summed with the top-k: 1, 2, 4 or 8 (1 alone for the decode kernel)."""
    float32_partials: bool | None = None
    """Keep each pair's output in FP32 until the top-k sum instead of x's dtype."""
    early_weights: bool = True
    """GEMM 2 starts to stream weights before its input is complete."""


DEFAULT_TUNING = Tuning()


def quads_moe(
    x: Tensor,
    prepared: PreparedMoE,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    compensation: MoECompensation = NO_COMPENSATION,
    four_over_six: bool = False,
    g13: Tensor | None = None,
    g2: Tensor | None = None,
    expert_map: Tensor | None = None,
    quantized: bool = True,
    router_on_input: bool = False,
    statistics: Gathering | None = None,
    out: Tensor | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> Tensor:
    """y [M, H] = sum over top-k of router weight * w2(silu(gate) * up), activations in NVFP4, in x's dtype.

    x: bfloat16 or float16 [M, H], rows contiguous; topk_weights: float32 [M, k]; topk_ids: int32 or int64 [M, k],
    global expert ids, those outside 0..global-1 contribute nothing; expert_map: int32 [global experts], local expert or
    -1. g13 (float32 scalar) and g2 (float32 [E]) are static encode global scales, None means one per token.
    `quantized=False` leaves activations in 16 bits (W4A16; of `compensation` nothing may be set). `router_on_input`
    multiplies x by the router weight, rounded to x's dtype, instead of the output (Llama 4; top-1 only, as one token
    has one operand). `statistics` gathers the errors of both quantizations. Capturable in a CUDA graph; tensors of
    `compensation`, g13 and g2 are read at replay. Raises FormatError for arguments that do not fit together.
    """
    _check(x, prepared, topk_weights, topk_ids, expert_map)
    if not quantized and any(v is not None and v is not False for v in vars(compensation).values()):
        raise FormatError("compensation: there is none of activations that are not quantized")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()):
        raise FormatError(f"out is {out.dtype} {tuple(out.shape)}, expected contiguous {x.dtype} {tuple(x.shape)}")
    tokens, top_k = topk_ids.shape
    if router_on_input:
        if top_k != 1:
            raise FormatError(f"router_on_input: needs one expert a token, topk_ids has {top_k}")
        x = x * topk_weights.to(x.dtype)
    if out is None:
        out = torch.empty(tokens, prepared.hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    lib, stream = _native.library(), _native.stream()
    device, pairs, experts = x.device, tokens * top_k, prepared.num_experts
    k1, k2 = padded_k(prepared.hidden), padded_k(prepared.intermediate)
    global_experts = experts if expert_map is None else expert_map.numel()
    plan = plan_layer(
        LayerShape(tokens, top_k, experts, global_experts, prepared.hidden, prepared.intermediate),
        device_limits(),
        gemms=(tuning.gemm1, tuning.gemm2),
        k_groups=(tuning.k_groups1, tuning.k_groups2),
        capacity=tuning.capacity,
        splits=tuning.splits,
    )
    capacity = plan.capacity
    max_segments = min(pairs, experts + pairs // capacity)
    blocks = -(-pairs // lib.quads_pairs_per_block())

    sizes = (pairs, pairs, 3 * max_segments, 2, *((pairs, blocks * experts) if blocks > 1 else (0, 0)))
    integers = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    pair_expert, sorted_pairs, segments, num_segments, rank, histogram = integers
    decode = torch.empty(tokens + pairs, dtype=torch.float32, device=device)
    operand1 = torch.empty(tokens, k1, dtype=torch.float16, device=device)
    h = torch.empty(pairs, prepared.intermediate, dtype=x.dtype, device=device)
    operand2 = torch.empty(pairs, k2, dtype=torch.float16, device=device)
    wide = tuning.float32_partials if tuning.float32_partials is not None else pairs <= FLOAT32_PARTIALS_PAIRS
    wide = wide or plan.splits > 1
    y = torch.empty(pairs * plan.splits, prepared.hidden, dtype=torch.float32 if wide else x.dtype, device=device)

    c = compensation
    align = AlignArgs(
        ids=topk_ids.data_ptr(),
        expert_map=_native.pointer(expert_map),
        pair_expert=pair_expert.data_ptr(),
        sorted=sorted_pairs.data_ptr(),
        segments=segments.data_ptr(),
        num_segments=num_segments.data_ptr(),
        pairs=pairs,
        id_stride=topk_ids.element_size() // 4,
        global_experts=global_experts,
        local_experts=experts,
        capacity=capacity,
        rank=rank.data_ptr(),
        histogram=histogram.data_ptr(),
        blocks=blocks,
    )
    dtype, four = DTYPES[x.dtype], int(four_over_six)
    decode1, decode2 = decode[:tokens], decode[tokens:]
    quantize1 = QuantizeArgs(rows=0, k=BLOCK_SIZE)
    if quantized:
        how = Operand(c.center13, c.center13_by_chunk, g=g13, mask=c.mask13, full=c.full, full_all=c.full_all)
        quantize1 = how.args(x, operand1, decode1)
    _native.check(
        lib.quads_prologue(ctypes.byref(align), ctypes.byref(quantize1), dtype, four, stream),
        "grouping and quantization",
    )
    if not quantized:
        cast_rows(x, operand1, decode1)
    gemm = GemmArgs(
        weights=prepared.w13.data_ptr(),
        operand=operand1.data_ptr(),
        decode=decode1.data_ptr(),
        alpha=prepared.w13_decode.data_ptr(),
        bias=_native.pointer(c.bias13),
        segments=segments.data_ptr(),
        num_segments=num_segments.data_ptr(),
        sorted=sorted_pairs.data_ptr(),
        out=h.data_ptr(),
        kblocks=k1 // K_BLOCK,
        row_tiles=prepared.w13.shape[1] * K_BLOCK // k1,
        ldb=k1,
        row_divisor=top_k,
        channels=prepared.intermediate,
        ldo=prepared.intermediate,
        bias_stride=2 * prepared.intermediate,
        max_tokens=capacity,
        splits=1,
    )
    launch_gemm(gemm, SWIGLU, dtype, plan.first, False)
    if quantized:
        # `early`: the GEMM has waited for the grouping, and launches what comes next only then.
        how = Operand(
            g=g2, mask=c.mask2, full=c.full, full_all=c.full_all, full_divisor=top_k, group=pair_expert, early=True
        )
        how.quantize(h, operand2, decode2, four_over_six)
    else:
        cast_rows(h, operand2, decode2, pair_expert)
    gemm.weights = prepared.w2.data_ptr()
    gemm.operand = operand2.data_ptr()
    gemm.decode = decode2.data_ptr()
    gemm.alpha = prepared.w2_decode.data_ptr()
    gemm.bias = None
    gemm.router = None if router_on_input else topk_weights.data_ptr()
    gemm.out = y.data_ptr()
    gemm.kblocks = k2 // K_BLOCK
    gemm.row_tiles = prepared.w2.shape[1] * K_BLOCK // k2
    gemm.ldb = k2
    gemm.row_divisor = 1
    gemm.channels = prepared.hidden
    gemm.ldo = prepared.hidden
    gemm.splits = plan.splits
    launch_gemm(gemm, PLAIN, DTYPES[y.dtype], plan.second, tuning.early_weights)
    gathering = statistics if quantized else None
    # A launch that also gathers does not fit beside the GEMM's last blocks: with few tokens two launches end earlier.
    together = gathering is not None and tokens >= TOGETHER_TOKENS
    if not together:
        sum_rows(y, pair_expert, out, top_k, plan.splits)
    if gathering is not None:
        assert gathering.w2 is not None
        first = site_args(x, gathering.w13, center=c.center13, g=g13)
        second = site_args(h, gathering.w2, g=g2, group=pair_expert, divisor=top_k)
        second.order, second.num_segments = sorted_pairs.data_ptr(), num_segments.data_ptr()
        scales = decode1 if g13 is None else None
        ending = (sum_args(y, pair_expert, out, top_k, plan.splits), y.dtype) if together else None
        launch_statistics(gathering, (first, second), x.dtype, four_over_six, scales, ending)
    return out


TOGETHER_TOKENS = 16
"""From this many tokens on statistics join the launch of the top-k sum."""
FLOAT32_PARTIALS_PAIRS = 4096
"""Up to this many pairs the per-pair outputs stay in FP32 until they are summed."""


def _check(x: Tensor, p: PreparedMoE, weights: Tensor, ids: Tensor, expert_map: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() != 2 or x.shape[1] != p.hidden or x.stride(1) != 1:
        raise FormatError(
            f"x is {x.dtype} {tuple(x.shape)}, expected bfloat16 or float16 [M, {p.hidden}] with contiguous rows"
        )
    if x.data_ptr() % 16 or x.stride(0) % 8:
        raise FormatError("x: rows must start at multiples of 16 bytes")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise FormatError(
            f"topk_ids {tuple(ids.shape)} and topk_weights {tuple(weights.shape)} do not fit {x.shape[0]} tokens"
        )
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise FormatError(f"topk_ids is {ids.dtype}, expected contiguous int32 or int64")
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise FormatError(f"topk_weights is {weights.dtype}, expected contiguous float32")
    if expert_map is not None and expert_map.dtype != torch.int32:
        raise FormatError(f"expert_map is {expert_map.dtype}, expected int32")
