# SPDX-License-Identifier: Apache-2.0
"""Launches that the MoE layer and the dense linear share: operands and GEMMs, on the current stream."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels._native import DTYPES, CastArgs, GemmArgs, QuantizeArgs, SumArgs
from vllm_quads.kernels.layout import K_BLOCK
from vllm_quads.kernels.plan import DeviceLimits, Gemm, GemmChoice

SWIGLU, PLAIN = 0, 1
"""Epilogues: silu(gate) * up of two rows, or one output channel a row."""


@dataclass(frozen=True)
class Operand:
    """How rows become a merged operand; see `quantize.quantize_merged`."""

    center: Tensor | None = None
    center_by_chunk: Tensor | None = None
    """The same vector in the order of `layout.by_chunk`, which is faster to read."""
    g: Tensor | None = None
    mask: Tensor | None = None
    full: Tensor | None = None
    full_all: bool = False
    full_divisor: int = 1
    """Rows that share an entry of `full`."""
    group: Tensor | None = None
    early: bool = False
    """The launch before this one has waited for what wrote `mask`, `full` and `group`."""

    def args(self, x: Tensor, operand: Tensor, decode: Tensor) -> QuantizeArgs:
        """Arguments for x [M, K] to the FP16 operand [M, padded K] and its decode scales float32 [M]."""
        return QuantizeArgs(
            x=x.data_ptr(),
            center=_native.pointer(self.center if self.center_by_chunk is None else self.center_by_chunk),
            g=_native.pointer(self.g),
            mask=_native.pointer(self.mask),
            full=_native.pointer(self.full),
            group=_native.pointer(self.group),
            merged=operand.data_ptr(),
            decode=decode.data_ptr(),
            rows=x.shape[0],
            k=x.shape[1],
            ldx=x.stride(0),
            ldm=operand.stride(0),
            full_divisor=self.full_divisor,
            full_all=self.full_all,
            by_chunk=self.center_by_chunk is not None,
            early=self.early,
        )

    def quantize(self, x: Tensor, operand: Tensor, decode: Tensor, four_over_six: bool) -> None:
        """Quantize with residual."""
        args = self.args(x, operand, decode)
        code = _native.library().quads_quantize(
            ctypes.byref(args), DTYPES[x.dtype], int(four_over_six), 0, _native.stream()
        )
        _native.check(code, "activation quantization")


def cast_rows(x: Tensor, operand: Tensor, decode: Tensor, group: Tensor | None = None) -> None:
    """Unquantized rows as FP16 operands times a power of two, inverted in `decode`; negative groups are skipped."""
    args = CastArgs(
        x=x.data_ptr(),
        group=_native.pointer(group),
        operand=operand.data_ptr(),
        decode=decode.data_ptr(),
        rows=x.shape[0],
        k=x.shape[1],
        ldx=x.stride(0),
        ldm=operand.stride(0),
    )
    _native.check(_native.library().quads_cast(ctypes.byref(args), DTYPES[x.dtype], _native.stream()), "cast")


def launch_gemm(args: GemmArgs, epilogue: int, dtype: int, choice: GemmChoice, early_weights: bool) -> None:
    """Launch one GEMM. early_weights: start to stream weights before the predecessor is complete."""
    lib, stream = _native.library(), _native.stream()
    if choice.gemm in (Gemm.WIDE, Gemm.PREFILL):
        kernel = lib.quads_moe_wide if choice.gemm is Gemm.WIDE else lib.quads_moe_prefill
        code = kernel(ctypes.byref(args), epilogue, dtype, int(early_weights), stream)
    else:
        kernel = lib.quads_moe_decode if choice.gemm is Gemm.DECODE else lib.quads_moe_batch
        code = kernel(ctypes.byref(args), epilogue, dtype, choice.k_groups, int(early_weights), stream)
    _native.check(code, f"{choice.gemm.value} GEMM")


@functools.cache
def device_limits() -> DeviceLimits:
    """What the planner has to know of the kernels and this GPU."""
    lib = _native.library()
    return DeviceLimits(
        multiprocessors=torch.cuda.get_device_properties().multi_processor_count,
        decode_capacity=functools.cache(lambda k, groups: int(lib.quads_moe_decode_capacity(k // K_BLOCK, groups))),
        batch_capacity=functools.cache(lambda groups: int(lib.quads_moe_batch_capacity(groups))),
    )


def sum_args(y: Tensor, pair_expert: Tensor | None, out: Tensor, top_k: int, splits: int) -> SumArgs:
    """out [M, N] = sum of y [M * top_k * splits, N] over a token's pairs and their K splits, in order, in float32.

    pair_expert: int32 [M * top_k], negative pairs are left out; None: all count. splits: a power of two.
    """
    return SumArgs(
        y=y.data_ptr(),
        pair_expert=_native.pointer(pair_expert),
        out=out.data_ptr(),
        ldo=out.stride(0),
        tokens=out.shape[0],
        top_k=top_k,
        columns=out.shape[1],
        ldy=y.stride(0),
        shift=splits.bit_length() - 1,
    )


def sum_rows(y: Tensor, pair_expert: Tensor | None, out: Tensor, top_k: int, splits: int) -> None:
    """Launch the sum of `sum_args`."""
    args = sum_args(y, pair_expert, out, top_k, splits)
    code = _native.library().quads_sum(ctypes.byref(args), DTYPES[y.dtype], DTYPES[out.dtype], _native.stream())
    _native.check(code, "sum over top-k")
