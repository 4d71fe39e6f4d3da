# SPDX-License-Identifier: Apache-2.0
"""NVFP4 dense linear on Hopper in two launches: the operand (quantization with residual, or a cast), and the GEMM.

    prepared = prepare_linear(codes, scales, decode)
    y = quads_linear(x, prepared, compensation=..., four_over_six=...)

The same kernels and numerics as one expert of `quads_moe`, but every output channel may have a decode scale of its own,
so that matrices stored as one (q, k, v; gate, up) keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels._native import GemmArgs
from vllm_quads.kernels.launch import DTYPES, PLAIN, Operand, cast_rows, device_limits, launch_gemm, sum_rows
from vllm_quads.kernels.layout import K_BLOCK, ROW_TILE, arrange_into, arranged_shape, padded_k, padded_rows
from vllm_quads.kernels.plan import LinearPlan, LinearShape, plan_linear
from vllm_quads.kernels.statistics import Gathering, launch_statistics, site_args
from vllm_quads.nvfp4.errors import FormatError


@dataclass(frozen=True)
class PreparedLinear:
    """A matrix [N, K] in the kernels' layout. Buffers keep their addresses over refits (`out=`)."""

    weight: Tensor
    """uint8 [1, blocks, 2304]; see `layout.arrange_into`."""
    decode: Tensor
    """float32 [N]: decode global scale of each output channel."""
    ones: Tensor
    """float32 [1, 2]: the kernels' scale per expert."""
    rows: int
    k: int


@dataclass(frozen=True)
class LinearCompensation:
    """Residual compensation and centring of one linear. Tensors may be updated in place between graph replays."""

    mask: Tensor | None = None
    """bool or uint8 [K / 16]: blocks of the input whose residual is added."""
    center: Tensor | None = None
    """float32 [K]: subtracted from the input before it is quantized."""
    center_by_chunk: Tensor | None = None
    """float32 [K]: center once more, in the order of `layout.by_chunk`: optional, faster to read."""
    bias: Tensor | None = None
    """float32 [N]: added to the output (W @ center, the layer's own bias, or their sum)."""
    full: Tensor | None = None
    """bool or uint8 [M]: tokens that get the residual of every block (the rows form)."""
    full_all: bool = False
    """Every token gets the residual of every block."""


NO_COMPENSATION = LinearCompensation()


def prepare_linear(codes: Tensor, scales: Tensor, decode: Tensor, out: PreparedLinear | None = None) -> PreparedLinear:
    """Re-arrange a packed matrix for the kernels (bytes move, nothing is re-quantized).

    codes: uint8 [N, K/2] (low nibble = even k); scales: float8_e4m3fn [N, K/16]; decode: float32 scalar or [N]. `out`
    is a preparation of the same shape to write into, so that captured graphs see the new weights. Raises FormatError.
    """
    rows, k = codes.shape[0], 2 * codes.shape[1]
    if rows % 16:
        raise FormatError(f"codes: {rows} output channels on this rank, expected a multiple of 16")
    if out is None:
        device = codes.device
        out = PreparedLinear(
            torch.empty(1, *arranged_shape(rows, k), dtype=torch.uint8, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.ones(1, 2, dtype=torch.float32, device=device),
            rows,
            k,
        )
    elif (out.rows, out.k) != (rows, k):
        raise FormatError(f"out was prepared for {(out.rows, out.k)} (N, K), not for {(rows, k)}")
    arrange_into(codes[None], scales[None], out.weight, gate_up=False)
    # After the weights: the GEMM may start to read weights before its predecessor is complete, never before this copy.
    out.decode.copy_(decode.expand(rows))
    return out


def quads_linear(
    x: Tensor,
    prepared: PreparedLinear,
    *,
    compensation: LinearCompensation = NO_COMPENSATION,
    four_over_six: bool = False,
    g: Tensor | None = None,
    quantized: bool = True,
    statistics: Gathering | None = None,
    out: Tensor | None = None,
    plan: LinearPlan | None = None,
) -> Tensor:
    """y [M, N] = W @ x for x [M, K], in x's dtype (bfloat16 or float16, contiguous rows).

    Activations are quantized to NVFP4 (W4A4; g: static encode global scale, float32 scalar, None means one per token),
    or stay in 16 bits with `quantized=False` (W4A16: only `compensation.bias` is used). `plan` overrides the kernel,
    the tokens that it multiplies at a time and the parts of K; `statistics` gathers the quantization's errors.
    Capturable in a CUDA graph; tensors of `compensation` and g are read at replay.
    """
    tokens = x.shape[0]
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() != 2 or x.shape[1] != prepared.k or x.stride(1) != 1:
        raise FormatError(
            f"x is {x.dtype} {tuple(x.shape)}, expected bfloat16 or float16 [M, {prepared.k}] with contiguous rows"
        )
    if x.data_ptr() % 16 or x.stride(0) % 8:
        raise FormatError("x: rows must start at multiples of 16 bytes")
    if out is None:
        out = torch.empty(tokens, prepared.rows, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    kp = padded_k(prepared.k)
    operand = torch.empty(tokens, kp, dtype=torch.float16, device=x.device)
    decode = torch.empty(tokens, dtype=torch.float32, device=x.device)
    c = compensation
    if quantized:
        how = Operand(c.center, c.center_by_chunk, g=g, mask=c.mask, full=c.full, full_all=c.full_all)
        how.quantize(x, operand, decode, four_over_six)
    else:
        cast_rows(x, operand, decode)
    plan = plan or plan_linear(LinearShape(tokens, prepared.rows, prepared.k), device_limits())
    y = out
    if plan.splits > 1:
        y = torch.empty(tokens * plan.splits, prepared.rows, dtype=torch.float32, device=x.device)
    gemm = GemmArgs(
        weights=prepared.weight.data_ptr(),
        operand=operand.data_ptr(),
        decode=decode.data_ptr(),
        alpha=prepared.ones.data_ptr(),
        bias=_native.pointer(c.bias),
        channel=prepared.decode.data_ptr(),
        out=y.data_ptr(),
        kblocks=kp // K_BLOCK,
        row_tiles=padded_rows(prepared.rows) // ROW_TILE,
        ldb=kp,
        row_divisor=1,
        channels=prepared.rows,
        ldo=y.stride(0),
        bias_stride=prepared.rows,
        max_tokens=plan.capacity,
        rows=tokens,
        splits=plan.splits,
    )
    # weights are constant: the GEMM may start to stream them while the operand is made
    launch_gemm(gemm, PLAIN, DTYPES[y.dtype], plan.kernel, True)
    if plan.splits > 1:
        sum_rows(y, None, out, 1, plan.splits)
    if statistics is not None and quantized:
        site = site_args(x, statistics.w13, center=c.center, g=g)
        launch_statistics(statistics, (site,), x.dtype, four_over_six, decode if g is None else None)
    return out
