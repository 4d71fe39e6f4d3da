# SPDX-License-Identifier: Apache-2.0
"""Quantization of weights and stacks of weights: Triton on GPUs, the reference elsewhere, the same bits everywhere.

Nothing here waits for the device, so NaN and Inf cannot be refused on the spot: they end up in the amax. Collect the
amax values of a batch in a `FiniteCheck` and ask it once. All functions write into the outputs that they are given, at
their addresses, and allocate what they are not given.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_quads.kernels._native import DTYPES, on_device
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.fingerprint import CODES_PER_WORD, packed_digest
from vllm_quads.nvfp4.formats import BLOCK_SIZE, E2M1_MAX, check_k, pack_codes
from vllm_quads.nvfp4.packed import PackedTensor
from vllm_quads.nvfp4.reference import encode_scale, quantize_blocks, quantize_weight

if TYPE_CHECKING:
    from types import ModuleType

_WORDS = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
_BLOCKS = 128
"""Blocks of 16 weights in a tile."""
_WARPS = 4
_PROGRAMS_PER_SM = 96
_GUARDED_PROGRAMS_PER_SM = 4
"""A guarded kernel has nothing to do as a rule."""
_DIGEST_PROGRAMS_PER_SM = 32
_DIGEST_TILE = (32, 32)
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


class QuantizedStack(NamedTuple):
    """Packed weights [..., N, K], as `PackedTensor` holds them."""

    codes: Tensor
    """uint8 [..., N, K/2], low nibble = even k."""
    block_scales: Tensor
    """float8_e4m3fn [..., N, K/16]."""
    decode_scale: Tensor
    """float32 [...]: 1/g of each matrix."""

    def packed(self, name: str = "weight") -> PackedTensor:
        """The same tensors as a `PackedTensor`."""
        return PackedTensor(*self, name)


class FiniteCheck:
    """Collects amax values and raises for those that are NaN or Inf, with one wait for the device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._amax: list[Tensor] = []

    def add(self, name: str, amax: Tensor) -> None:
        """Watch the amax float32 [...] of a weight or stack; the tensor is kept and read at the check."""
        self._names.append(name)
        self._amax.append(amax)

    def check(self) -> None:
        """Raise FormatError naming the first weight, and its matrix, that holds NaN or Inf; then forget all."""
        names, amaxes, self._names, self._amax = self._names, self._amax, [], []
        if not amaxes:
            return
        if bool(torch.isfinite(torch.cat([a.flatten() for a in amaxes])).all()):
            return
        index = next(i for i, a in enumerate(amaxes) if not bool(torch.isfinite(a).all()))
        bad = (~torch.isfinite(amaxes[index].flatten())).nonzero().flatten()
        where = f", matrix {int(bad[0])} of the stack" if amaxes[index].dim() else ""
        raise FormatError(
            f"{names[index]}: holds NaN or Inf{where}, which NVFP4 cannot represent; "
            f"the model has diverged or the file is damaged"
        )


def weight_amax(weights: Tensor | Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """max |BF16(W)| of each matrix, float32 [...]; NaN or Inf where a matrix holds one (see `FiniteCheck`).

    weights: bfloat16, float16 or float32 [..., N, K], or several that share global scales (gate and up; q, k, v), which
    agree in all but N. Given `out`, it is overwritten.
    """
    weights = [weights] if isinstance(weights, Tensor) else list(weights)
    lead = weights[0].shape[:-2]
    for w in weights:
        check_weight(w)
        if w.shape[:-2] != lead:
            raise FormatError(f"weights that share a scale have shapes {tuple(w.shape)} and {tuple(weights[0].shape)}")
    if out is None:
        out = torch.empty(lead, dtype=torch.float32, device=weights[0].device)
    _check_out(out, lead, torch.float32, "amax")
    triton = _triton(weights[0])
    if triton is None:
        out.copy_(torch.stack([_reference_amax(w) for w in weights]).amax(dim=0))
        return out
    out.zero_()
    for w in weights:
        _raise_amax(triton, w, out)
    return out


def raise_amax(weight: Tensor, out: Tensor) -> Tensor:
    """Raise out, float32 [...], to `weight_amax` of weights [..., N, K] where that is larger or NaN; returns out."""
    check_weight(weight)
    _check_out(out, weight.shape[:-2], torch.float32, "amax")
    triton = _triton(weight)
    if triton is None:
        return torch.maximum(out, _reference_amax(weight), out=out)
    _raise_amax(triton, weight, out)
    return out


def _raise_amax(triton: ModuleType, weight: Tensor, out: Tensor) -> None:
    operand = _Operand.of(weight)
    geometry = operand.geometry
    _launch(
        triton.amax_kernel,
        geometry,
        operand.matrices,
        *(operand.words, out.view(torch.int32), geometry.blocks, geometry.per_row, *geometry.strides[0]),
        DTYPE=operand.dtype,
        FLAT=geometry.flat,
    )


def quantize_stack(weight: Tensor, amax: Tensor, *, out: QuantizedStack | None = None) -> QuantizedStack:
    """Codes, block scales and decode scales of weights [..., N, K]; amax float32 [...] gives the global scales.

    Outputs may be views with any strides but along K (a half of w13, a shard). Same bytes as `PackedTensor.quantize`.
    """
    check_weight(weight)
    _check_amax(amax, weight)
    if out is None:
        out = _empty_packed(weight)
    _check_packed_out(out, weight)
    triton = _triton(weight)
    if triton is None:
        q = quantize_weight(weight, amax=amax)
        out.codes.copy_(pack_codes(q.codes()))
        out.block_scales.view(torch.uint8).copy_(q.scales.view(torch.uint8))
        out.decode_scale.copy_(q.decode_scale[..., 0, 0])
        return out
    _quantize(triton, _Operand.of(weight), amax, _Outputs.of(out, None), None)
    return out


def fake_quantize_stack(
    weight: Tensor, amax: Tensor, *, out: Tensor | None = None, packed: QuantizedStack | None = None
) -> Tensor:
    """Quantized and dequantized weights [..., N, K] in the weight's dtype; as `fake_quantize_weight`.

    packed: if given, the codes and scales are written as well, in the same pass.
    """
    check_weight(weight)
    _check_amax(amax, weight)
    if out is None:
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _check_out(out, weight.shape, weight.dtype, "output", gaps=True)
    triton = _triton(weight)
    if triton is None:
        out.copy_(quantize_weight(weight, amax=amax).dequantize())
        if packed is not None:
            quantize_stack(weight, amax, out=packed)
        return out
    _quantize(triton, _Operand.of(weight), amax, _Outputs.of(packed, out), None)
    return out


def dequantize_stack(
    packed: QuantizedStack, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """(code * block scale) * decode scale [..., N, K], rounded once to dtype; as `PackedTensor.dequantize`."""
    shape = (*packed.codes.shape[:-1], 2 * packed.codes.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.codes.device)
    _check_out(out, shape, out.dtype, "output", gaps=True)
    triton = _triton(packed.codes)
    if triton is None or out.dtype not in DTYPES:
        out.copy_(packed.packed().dequantize(out.dtype))
        return out
    codes, matrices, (n, half_k) = _stack(packed.codes)
    target = _Outputs.of(packed, out)
    geometry = _geometry((n, 2 * half_k), *target.strides)
    without_gaps = _without_gaps(geometry, (codes, target.scales, target.values))
    if without_gaps and out.dtype != torch.float32 and codes.storage_offset() % 4 == 0:
        _dequantize(codes, target, packed.decode_scale.contiguous(), matrices, geometry.blocks * 2, out.dtype)
        return out
    _launch(
        triton.dequantize_kernel,
        geometry,
        matrices,
        *(codes, target.scales, packed.decode_scale.contiguous(), target.values),
        *(geometry.blocks, geometry.per_row, *(s for pair in geometry.strides for s in pair)),
        DTYPE=DTYPES[out.dtype],
        FLAT=geometry.flat,
    )
    return out


def clamp_gradient(grad: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
    """grad [..., N, K] times 1 where the quantizer does not saturate, |W| <= 6 * block scale * decode scale, else 0."""
    check_weight(weight)
    _check_amax(amax, weight)
    triton = _triton(weight)
    if triton is None or grad.dtype != weight.dtype:
        return grad * representable(weight, amax)
    grad, w = grad.contiguous(), _Operand.of(weight.contiguous())
    out = torch.empty_like(grad)
    _launch(
        triton.clamp_gradient_kernel,
        w.geometry,
        w.matrices,
        *(_words(grad), w.words, amax.contiguous(), _words(out), w.geometry.blocks),
        DTYPE=w.dtype,
    )
    return out


def representable(weight: Tensor, amax: Tensor) -> Tensor:
    """bool [..., N, K]: True where the quantizer does not saturate, |W| <= 6 * block scale * decode scale."""
    w = weight.detach().to(torch.bfloat16)
    q = quantize_blocks(w, encode_scale(amax)[..., None, None])
    largest = (E2M1_MAX * q.scales.to(torch.float32)) * q.decode_scale
    return w.abs().to(torch.float32) <= largest.repeat_interleave(BLOCK_SIZE, dim=-1)


def digest_stack(
    packed: QuantizedStack,
    *,
    row_offset: int = 0,
    k_offset: int = 0,
    count_global: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Digests int64 [...] of packed matrices, as `packed_digest` (same values), in one launch.

    Codes and block scales may be views with any strides but along K. Given `out`, it is overwritten.
    """
    lead = packed.codes.shape[:-2]
    if out is None:
        out = torch.empty(lead, dtype=torch.int64, device=packed.codes.device)
    _check_out(out, lead, torch.int64, "digests")
    if _triton(packed.codes) is None:
        value = packed_digest(packed.packed(), row_offset=row_offset, k_offset=k_offset, count_global=count_global)
        return out.copy_(value)
    from vllm_quads.kernels.digests_triton import digest_kernel

    codes, matrices, (rows, half_k) = _stack(packed.codes)
    scales = _stack(packed.block_scales)[0]
    words = codes.view(torch.int32)
    tile_rows, tile_columns = _DIGEST_TILE
    across = -(-(half_k // 4) // tile_columns)
    wanted = -(-_programs(codes.device, _DIGEST_PROGRAMS_PER_SM) // (matrices * across))
    groups = max(1, min(-(-rows // tile_rows), wanted))
    programs = across * groups
    out.zero_()
    with on_device(codes.device):
        digest_kernel[(programs, matrices)](
            *(words, scales.view(torch.uint8), packed.decode_scale.contiguous(), out, rows, half_k // 4),
            *(words.stride(0), words.stride(1), scales.stride(0), scales.stride(1)),
            *(row_offset, k_offset // CODES_PER_WORD),
            GLOBAL=count_global,
            R=tile_rows,
            C=tile_columns,
            num_warps=_WARPS,
        )
    return out


# --- launches --------------------------------------------------------------------------------------------------------


class _Geometry(NamedTuple):
    """How a kernel finds the blocks of a matrix in each of its tensors."""

    blocks: int
    """Blocks of 16 weights in a matrix."""
    per_row: int
    flat: bool
    """True if rows follow each other without gaps in all tensors."""
    strides: tuple[tuple[int, int], ...]
    """(of a matrix, of a row) of each tensor, in machine words or bytes: eight, or one scale, are a block."""


@functools.lru_cache(maxsize=4096)
def _geometry(shape: tuple[int, int], *tensors: tuple[tuple[int, ...], int]) -> _Geometry:
    """shape (N, K); per tensor [E, N, ...] the strides of its first two dimensions and its elements in a block."""
    n, k = shape
    per_row = k // BLOCK_SIZE
    strides = tuple((matrix, row) for (matrix, row, *_), _ in tensors)
    if n * per_row * 8 >= 2**31 or any(row * n >= 2**31 for _, row in strides):
        raise FormatError(f"a matrix of shape {shape} is too large for the kernels (2^31 words)")
    flat = n == 1 or all(row == per_row * width for (_, row, *_), width in tensors)
    return _Geometry(n * per_row, per_row, flat, strides)


class _Operand(NamedTuple):
    """A weight as a kernel reads it."""

    words: Tensor
    """[E, N, K/2] machine words, a view of the weight (of a copy, where it has no such view)."""
    matrices: int
    shape: tuple[int, int]
    """(N, K)"""
    geometry: _Geometry
    """Of the weight alone."""
    dtype: int

    @staticmethod
    def of(weight: Tensor) -> _Operand:
        t, matrices, shape = _stack(_input(weight.detach()))
        words = _words(t)
        return _Operand(words, matrices, shape, _geometry(shape, (words.stride(), 8)), DTYPES[t.dtype])


class _Outputs(NamedTuple):
    """Where the quantization kernel writes."""

    codes: Tensor | None
    scales: Tensor | None
    decode_scale: Tensor | None
    values: Tensor | None
    """[E, N, K/2] machine words."""
    strides: tuple[tuple[tuple[int, ...], int], ...]
    """(strides, elements in a block) of codes, scales and values, of those that exist."""

    @staticmethod
    def of(packed: QuantizedStack | None, values: Tensor | None) -> _Outputs:
        codes = scales = decode = words = None
        strides: list[tuple[tuple[int, ...], int]] = []
        if packed is not None:
            codes, scales = _stack(packed.codes)[0], _stack(packed.block_scales.view(torch.uint8))[0]
            decode = packed.decode_scale
            strides += [(codes.stride(), 8), (scales.stride(), 1)]
        if values is not None:
            words = _words(_stack(values)[0])
            strides.append((words.stride(), 8))
        return _Outputs(codes, scales, decode, words, tuple(strides))


def _quantize(triton: ModuleType, weight: _Operand, amax: Tensor, out: _Outputs, guard: Tensor | None) -> None:
    geometry = _geometry(weight.shape, (weight.words.stride(), 8), *out.strides)
    own, *others = geometry.strides
    none = (0, 0)
    pack = (others.pop(0), others.pop(0)) if out.codes is not None else (none, none)
    values = others.pop(0) if out.values is not None else none
    unused = amax  # some pointer, for what is not written
    _launch(
        triton.quantize_kernel,
        geometry,
        weight.matrices,
        *(weight.words, amax.contiguous()),
        *(unused if t is None else t for t in (out.codes, out.scales, out.decode_scale, out.values, guard)),
        *(geometry.blocks, geometry.per_row, *own, *pack[0], *pack[1], *values),
        DTYPE=weight.dtype,
        PACK=out.codes is not None,
        VALUES=out.values is not None,
        FLAT=geometry.flat,
        GUARDED=guard is not None,
    )


def _without_gaps(geometry: _Geometry, tensors: Sequence[Tensor | None]) -> bool:
    """True if the matrices follow each other without gaps as well."""
    return geometry.flat and all(t is not None and t.is_contiguous() for t in tensors)


def _dequantize(
    codes: Tensor, target: _Outputs, decode_scale: Tensor, matrices: int, words: int, dtype: torch.dtype
) -> None:
    """words: of eight codes, in a matrix."""
    from vllm_quads.kernels.dequantize_triton import dequantize_stack_kernel

    assert target.scales is not None
    threads = 32 * _WARPS
    with on_device(codes.device):
        dequantize_stack_kernel[(-(-words // (4 * threads)), matrices)](
            *(codes.view(torch.int32), target.scales, decode_scale, target.values, words),
            DTYPE=DTYPES[dtype],
            T=threads,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def _launch(kernel: Any, geometry: _Geometry, matrices: int, *args: Any, **options: Any) -> None:
    device = args[0].device
    tiles = -(-geometry.blocks // _BLOCKS)
    per_sm = _GUARDED_PROGRAMS_PER_SM if options.get("GUARDED") else _PROGRAMS_PER_SM
    wanted = max(1, min(tiles, -(-_programs(device, per_sm) // matrices)))
    programs = -(-tiles // -(-tiles // wanted))  # all of them with the same number of tiles, or one less
    with on_device(device):
        # Without fusion every operation is rounded once, as in the reference.
        kernel[(programs, matrices)](*args, **options, BLOCKS=_BLOCKS, num_warps=_WARPS, enable_fp_fusion=False)


@functools.cache
def _programs(device: torch.device, per_sm: int) -> int:
    """Programs of a launch; more than run at a time, since those that wait start wherever another one ends."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * per_sm


def _triton(tensor: Tensor) -> ModuleType | None:
    """The kernels, or None where the reference runs."""
    return _kernels() if tensor.is_cuda or (_INTERPRET and tensor.device.type == "cpu") else None


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from vllm_quads.kernels import weights_triton
    except ImportError:  # no Triton on this platform; the reference runs on any device
        return None
    return weights_triton


def _stack(t: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """[..., N, C] as a view [E, N, C], E, and (N, C)."""
    *lead, n, c = t.shape
    view = t[None] if not lead else t if len(lead) == 1 else t.view(-1, n, c)
    return view, view.shape[0], (n, c)


def _input(t: Tensor) -> Tensor:
    """The tensor, or a copy of it that the kernels can read as machine words."""
    strides = t.stride()
    fits = strides[-1] == 1 and all(s % 2 == 0 for s in strides[:-1]) and t.storage_offset() % 2 == 0
    return t if fits and (t.dim() <= 3 or t.is_contiguous()) else t.contiguous()


def _words(t: Tensor) -> Tensor:
    return t.view(_WORDS[t.dtype])


# --- checks ----------------------------------------------------------------------------------------------------------


def _reference_amax(weight: Tensor) -> Tensor:
    return weight.detach().abs().amax(dim=(-2, -1)).to(torch.bfloat16).to(torch.float32)


def check_weight(weight: Tensor) -> None:
    """Raise FormatError for what the functions above do not take."""
    if weight.dtype not in DTYPES or weight.dim() < 2:
        raise FormatError(
            f"weight is {weight.dtype} {tuple(weight.shape)}, expected bfloat16, float16 or float32 [..., N, K]"
        )
    check_k(weight.shape[-1], "weight")


def _check_amax(amax: Tensor, weight: Tensor) -> None:
    if amax.shape != weight.shape[:-2] or amax.dtype != torch.float32:
        raise FormatError(
            f"amax is {amax.dtype} {tuple(amax.shape)}, expected float32 {tuple(weight.shape[:-2])} "
            f"for weights {tuple(weight.shape)}"
        )


def _check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype, what: str, *, gaps: bool = False) -> None:
    """gaps: rows and matrices may lie apart."""
    fits = out.stride(-1) == 1 if gaps and out.dim() else out.is_contiguous()
    if out.shape != torch.Size(shape) or out.dtype != dtype or not fits:
        layout = "without gaps along its last dimension" if gaps else "contiguous"
        raise FormatError(
            f"{what} is {out.dtype} {tuple(out.shape)} with strides {out.stride()}, expected {dtype} {tuple(shape)}, "
            f"{layout}"
        )


def _check_packed_out(out: QuantizedStack, weight: Tensor) -> None:
    *lead, n, k = weight.shape
    _check_out(out.codes, (*lead, n, k // 2), torch.uint8, "codes", gaps=True)
    _check_out(out.block_scales, (*lead, n, k // BLOCK_SIZE), torch.float8_e4m3fn, "block scales", gaps=True)
    _check_out(out.decode_scale, lead, torch.float32, "decode scales")


def _empty_packed(weight: Tensor) -> QuantizedStack:
    *lead, n, k = weight.shape

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((*lead, *shape), dtype=dtype, device=weight.device)

    return QuantizedStack(
        empty(n, k // 2, dtype=torch.uint8),
        empty(n, k // BLOCK_SIZE, dtype=torch.float8_e4m3fn),
        empty(dtype=torch.float32),
    )
