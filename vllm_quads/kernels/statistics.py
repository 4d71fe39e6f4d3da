# SPDX-License-Identifier: Apache-2.0
"""Error statistics of quantized activations on Hopper, in one launch that captured CUDA graphs may hold; those of a MoE
layer join the launch that ends it.

Sums up what `compensation.SiteStatistics.update` does, from the activations alone: the kernel quantizes them once more.
The accumulators are those of `SiteStatistics`, which has a switch on the device that says whether a replay gathers.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels._native import SumArgs
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import check_k

MAX_RING_ROWS = 1024
"""Longest ring that the kernel fills."""


class SiteArgs(ctypes.Structure):
    """Mirror of `StatisticsSite` in csrc/statistics.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "x", "center", "g", "group", "order", "num_segments", "energy", "tokens"
        )),
        *((name, ctypes.c_int) for name in ("rows", "k", "ldx", "divisor", "blocks")),
    ]  # fmt: skip


class StatisticsArgs(ctypes.Structure):
    """Mirror of `StatisticsArgs` in csrc/statistics.cu."""

    _fields_ = [
        ("site", SiteArgs * 2),
        *((name, ctypes.c_void_p) for name in ("paused", "valid", "size", "ring", "written", "ticket")),
        *((name, ctypes.c_int) for name in ("ring_rows", "ring_blocks")),
    ]


class Accumulators(Protocol):
    """The tensors of `compensation.SiteStatistics`, all on the GPU."""

    energy: Tensor
    """float64 [G, K]: sum of squared residuals."""
    tokens: Tensor
    """int64 [G]: rows that were counted."""
    ring: Tensor
    """bfloat16 [R, K]: the most recent rows; R may be 0."""
    written: Tensor
    """int64 scalar: rows that were ever put into the ring."""
    ticket: Tensor
    """int32 [1]: scratch, zero between launches."""
    paused: Tensor
    """int32 [1]: a launch gathers only where this is zero."""


@dataclass(frozen=True)
class Gathering:
    """Where a layer's statistics go. Everything has a fixed address, so that captured graphs see changes."""

    w13: Accumulators
    """Accumulators of the layer's input. It may have a ring of up to 1024 rows; its switch counts for both sites."""
    w2: Accumulators | None = None
    """Accumulators of w2's input, one group per local expert."""
    valid: Tensor | None = None
    """int32 [1]: rows of the layer's input that count, the others are padding; None: all."""


@functools.cache
def _library() -> ctypes.CDLL:
    lib = _native.library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    lib.quads_statistics.argtypes = [pointer, integer, integer, pointer, pointer]
    lib.quads_sum_statistics.argtypes = [pointer, pointer, integer, integer, integer, pointer, pointer]
    return lib


def site_args(
    x: Tensor,
    statistics: Accumulators,
    *,
    center: Tensor | None = None,
    g: Tensor | None = None,
    group: Tensor | None = None,
    divisor: int = 1,
) -> SiteArgs:
    """One site of a launch: rows x [M, K], see `gather_statistics`. Raises FormatError."""
    groups, k = statistics.energy.shape
    if x.dtype not in _native.ACTIVATIONS or x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1:
        raise FormatError(
            f"x is {x.dtype} {tuple(x.shape)}, expected bfloat16 or float16 [M, {k}] with contiguous rows"
        )
    check_k(k, "x")
    if x.data_ptr() % 16 or x.stride(0) % 8:
        raise FormatError("x: rows must start at multiples of 16 bytes")
    if group is None and groups != 1:
        raise FormatError(f"group: is missing for statistics of {groups} groups")
    return SiteArgs(
        x=x.data_ptr(),
        center=_native.pointer(center),
        g=_native.pointer(g),
        group=_native.pointer(group),
        energy=statistics.energy.data_ptr(),
        tokens=statistics.tokens.data_ptr(),
        rows=x.shape[0],
        k=k,
        ldx=x.stride(0),
        divisor=divisor,
    )


def launch_statistics(
    gathering: Gathering,
    sites: tuple[SiteArgs, ...],
    dtype: torch.dtype,
    four_over_six: bool,
    decode: Tensor | None,
    ending: tuple[SumArgs, torch.dtype] | None = None,
) -> None:
    """One launch for the sites of a layer, the input first.

    decode: float32 [M], the decode global scales of the input's rows if those are one per row, else None. ending: what
    the same launch sums to rows of `dtype`, and what dtype it sums (`dtype` or float32).
    """
    args = StatisticsArgs(paused=gathering.w13.paused.data_ptr(), valid=_native.pointer(gathering.valid))
    for i, site in enumerate(sites):
        args.site[i] = site
    scratch = None
    ring = gathering.w13.ring
    if ring.shape[0]:
        if ring.shape[0] > MAX_RING_ROWS:
            raise FormatError(f"ring of {ring.shape[0]} rows: the kernel fills at most {MAX_RING_ROWS}")
        args.ring = ring.data_ptr()
        args.ring_rows = ring.shape[0]
        args.written = gathering.w13.written.data_ptr()
        args.ticket = gathering.w13.ticket.data_ptr()
        args.size = _native.pointer(decode)
        if decode is None:
            scratch = torch.empty(sites[0].rows, dtype=torch.float32, device=ring.device)
    how = (_native.DTYPES[dtype], int(four_over_six), _native.pointer(scratch), _native.stream())
    if ending is None:
        code = _library().quads_statistics(ctypes.byref(args), *how)
    else:
        total, partials = ending
        float32 = int(partials is torch.float32)
        code = _library().quads_sum_statistics(ctypes.byref(total), ctypes.byref(args), float32, *how)
    _native.check(code, "error statistics")


def gather_statistics(
    x: Tensor,
    gathering: Gathering,
    *,
    four_over_six: bool = False,
    center: Tensor | None = None,
    g: Tensor | None = None,
    group: Tensor | None = None,
    decode: Tensor | None = None,
) -> None:
    """Add the rows x [M, K] (bfloat16 or float16) to `gathering.w13`, as `SiteStatistics.update` would.

    center: float32 [K], subtracted before quantization; g: float32 [G] static encode global scales, None means one per
    row; group: int32 [M], negative rows are skipped; decode: float32 [M], the decode global scales that quantization
    gave (only without g). Energies are added up in float64 from float32 sums of a few hundred rows at most; rows with
    NaN, Inf or magnitudes beyond 2^50 do not count. Raises FormatError.
    """
    if decode is None and g is None and gathering.w13.ring.shape[0]:
        raise FormatError("decode: the ring needs the decode scales of the rows")
    site = site_args(x, gathering.w13, center=center, g=g, group=group)
    if not x.shape[0]:
        return
    launch_statistics(gathering, (site,), x.dtype, four_over_six, None if g is not None else decode)
