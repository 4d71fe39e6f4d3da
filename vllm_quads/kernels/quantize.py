# SPDX-License-Identifier: Apache-2.0
"""Fused activation quantization with residual on Hopper, in the two forms that GEMMs take."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels._native import QuantizeArgs
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE, check_k
from vllm_quads.nvfp4.swizzle import padded_shape


class Merged(NamedTuple):
    """Operand of an emulated W4A4 GEMM."""

    values: Tensor
    """float16 [M, K]: q * s + residual of the compensated blocks, global scale not applied."""
    decode_scale: Tensor
    """float32 [M]."""


class Packed(NamedTuple):
    """Operand of a native W4A4 GEMM with S residual channels appended along K."""

    codes: Tensor
    """uint8 [M, (K + S) / 2], low nibble = even k."""
    scales: Tensor
    """float8_e4m3fn [M, (K + S) / 16], or in the 128x4 swizzled layout (padding is zero)."""
    decode_scale: Tensor
    """float32 [M]."""


def quantize_merged(
    x: Tensor,
    *,
    four_over_six: bool = False,
    mask: Tensor | None = None,
    group: Tensor | None = None,
    full: Tensor | None = None,
    full_all: bool = False,
    center: Tensor | None = None,
    center_by_chunk: bool = False,
    g: Tensor | None = None,
) -> Merged:
    """Q(x) + scatter(Q(x - Q(x))), bit-identical to `compensation.forms.merged` in FP16.

    x: bfloat16 or float16 [M, K], contiguous rows. mask: bool [G, K/16], blocks that get the residual; group: int32
    [M], the row's entry of mask and g (None: 0; negative rows are skipped); full: bool [M], rows that get every block's
    residual. center: float32 [K], in the order of `layout.by_chunk` with center_by_chunk (faster). g: float32 [G]
    static encode global scales, None means one per row.
    """
    _check(x)
    m, k = x.shape
    values = torch.empty(m, k, dtype=torch.float16, device=x.device)
    decode = torch.empty(m, dtype=torch.float32, device=x.device)
    args = QuantizeArgs(
        x=x.data_ptr(),
        center=_native.pointer(center),
        g=_native.pointer(g),
        mask=_native.pointer(mask),
        full=_native.pointer(full),
        group=_native.pointer(group),
        merged=values.data_ptr(),
        decode=decode.data_ptr(),
        rows=m,
        k=k,
        ldx=x.stride(0),
        ldm=k,
        full_divisor=1,
        full_all=full_all,
        by_chunk=center_by_chunk,
    )
    _launch(args, x, four_over_six, packed=False)
    return Merged(values, decode)


def quantize_packed(
    x: Tensor,
    *,
    blocks: Tensor | None = None,
    four_over_six: bool = False,
    center: Tensor | None = None,
    g: Tensor | None = None,
    swizzled: bool = False,
) -> Packed:
    """Codes and block scales of Q(x), then those of the residual of `blocks`, for native FP4 GEMMs.

    x: bfloat16 or float16 [M, K]; blocks: int32 [S/16], ascending indices of the appended 16-channel blocks; g: float32
    scalar, None means one per row. Bit-identical to `quantize_with_residual`.
    """
    _check(x)
    m, k = x.shape
    appended = 0 if blocks is None else blocks.numel()
    columns = k // BLOCK_SIZE + appended
    codes = torch.empty(m, columns * 8, dtype=torch.uint8, device=x.device)
    if swizzled:
        scales = torch.zeros(padded_shape(m, columns), dtype=torch.uint8, device=x.device)
    else:  # every byte is written
        scales = torch.empty(m, columns, dtype=torch.uint8, device=x.device)
    decode = torch.empty(m, dtype=torch.float32, device=x.device)
    args = QuantizeArgs(
        x=x.data_ptr(),
        center=_native.pointer(center),
        g=_native.pointer(g),
        decode=decode.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        appended=_native.pointer(blocks),
        rows=m,
        k=k,
        ldx=x.stride(0),
        full_divisor=1,
        num_appended=appended,
        swizzled=swizzled,
    )
    _launch(args, x, four_over_six, packed=True)
    return Packed(codes, scales.view(torch.float8_e4m3fn), decode)


def _launch(args: QuantizeArgs, x: Tensor, four_over_six: bool, packed: bool) -> None:
    lib = _native.library()
    code = lib.quads_quantize(
        ctypes.byref(args), _native.DTYPES[x.dtype], int(four_over_six), int(packed), _native.stream()
    )
    _native.check(code, "activation quantization")


def _check(x: Tensor) -> None:
    if x.dtype not in _native.ACTIVATIONS or x.dim() != 2 or x.stride(1) != 1:
        raise FormatError(f"x is {x.dtype} {tuple(x.shape)}, expected bfloat16 or float16 [M, K] with contiguous rows")
    check_k(x.shape[1], "x")
    if x.data_ptr() % 16 or x.stride(0) % 8:
        raise FormatError("x: rows must start at multiples of 16 bytes")
