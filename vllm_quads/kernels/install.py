# SPDX-License-Identifier: Apache-2.0
"""Weights of a refit into the prepared layout in one pass (csrc/install.cu): with digests, checks and decode scales.

    install_packed(packed, out, gate_up=...)               packed weights
    stack_amax(weight, amax)                               and BF16 weights: first what their global scales come from,
    install_quantized(weight, amax, out, gate_up=...)      then quantized on the way

    Destination(out, gate_up=...).install(...)             either, for who installs again and again

Weights are stacks [E, P, N, K] of E experts with P parts each (gate and up of w13, else one). A part may be a shard,
and a view with any strides but along K. On a Hopper GPU each call is one launch on the current stream that waits for
nothing and allocates nothing; elsewhere plain torch gives the same bytes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.kernels import weights as w
from vllm_quads.kernels.layout import arrange_into, arranged_shape, on_hopper
from vllm_quads.kernels.weights import QuantizedStack
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE

BAD_SCALE = 1
"""Status bit: a block scale is NaN or negative."""
BAD_GLOBAL = 2
"""Status bit: a global scale is not a finite positive number."""
BAD_AMAX = 4
"""Status bit: an amax is not finite, so the weights hold NaN or Inf."""


class ShardPlace(NamedTuple):
    """Where a shard begins in its whole matrices, and whether it counts the global scale in digests."""

    row_offset: int
    k_offset: int
    count_global: bool


def install_packed(
    packed: QuantizedStack,
    out: Tensor,
    *,
    gate_up: bool,
    decode: Tensor | None = None,
    digests: Tensor | None = None,
    status: Tensor | None = None,
    row_offset: int = 0,
    k_offset: int = 0,
    count_global: bool = True,
) -> None:
    """Packed weights [E, P, N, K] into `out`, uint8 [E, *arranged_shape(P * N, K)], contiguous.

    gate_up: the parts are gate and up (P = 2); else P = 1. decode: float32 of E * P elements that the decode scales are
    written to. digests: int64 of E * P elements that the matrices' digests (`packed_digest` with these offsets) are
    added to, modulo 2^64. status: int32 [1] into which `BAD_SCALE` and `BAD_GLOBAL` are or-ed; the weights are written
    either way. Raises FormatError for what does not fit together.
    """
    lead, form = _packed_form(*map(_layout, packed), _layout(out), gate_up)
    _check_sinks(lead, out.device, decode, digests, status)
    place = ShardPlace(row_offset, k_offset, count_global)
    if packed.codes.data_ptr() % 8:
        packed = packed._replace(codes=packed.codes.clone())
    if form is not None and on_hopper(out):
        _native.install(form, *packed, out, decode=decode, digests=digests, status=status, **place._asdict())
        return
    codes, scales = packed.codes.flatten(1, 2).contiguous(), packed.block_scales.view(torch.uint8)
    arrange_into(codes, scales.flatten(1, 2).contiguous().view(torch.float8_e4m3fn), out, gate_up=gate_up)
    if decode is not None:
        decode.view(lead).copy_(packed.decode_scale)
    if digests is not None:
        digests.view(lead).add_(w.digest_stack(packed, **place._asdict()))
    if status is not None:
        scalars = packed.decode_scale
        _mark(status, (scales >= 0x7F).any(), BAD_SCALE)
        _mark(status, ~(torch.isfinite(scalars) & (scalars > 0)).all(), BAD_GLOBAL)


def stack_amax(weight: Tensor, out: Tensor) -> Tensor:
    """Raise float32 [E] to max |W| of each expert of weights [E, P, N, K]: what its parts share. Returns out.

    Start from zeros. NaN or Inf where an expert holds one.
    """
    if weight.dim() != 4 or out.shape != weight.shape[:1] or out.dtype != torch.float32 or not out.is_contiguous():
        raise FormatError(
            f"amax is {out.dtype} {tuple(out.shape)}, expected contiguous float32 [E] for weights [E, P, N, K], "
            f"which have shape {tuple(weight.shape)}"
        )
    parts = [weight.flatten(1, 2)] if weight.is_contiguous() else list(weight.unbind(1))
    for part in parts:
        w.raise_amax(part, out)
    return out


def install_quantized(
    weight: Tensor,
    amax: Tensor,
    out: Tensor,
    *,
    gate_up: bool,
    decode: Tensor | None = None,
    digests: Tensor | None = None,
    status: Tensor | None = None,
    row_offset: int = 0,
    k_offset: int = 0,
    count_global: bool = True,
) -> None:
    """BF16 weights [E, P, N, K], quantized, into `out`: the bytes of `quantize_stack` and `install_packed`.

    amax: float32 [E] or [E, P] that the global scales are taken from. status: `BAD_AMAX` as well. Everything else is as
    for `install_packed`.
    """
    w.check_weight(weight)
    amax = _by_part(amax, weight)
    lead, form = _quantized_form(_layout(weight), _layout(amax), _layout(out), gate_up)
    _check_sinks(lead, out.device, decode, digests, status)
    place = ShardPlace(row_offset, k_offset, count_global)
    if form is not None and weight.data_ptr() % 16 == 0 and on_hopper(out):
        _native.install(form, weight, None, amax, out, decode=decode, digests=digests, status=status, **place._asdict())
        return
    packed = w.quantize_stack(weight.contiguous(), amax.contiguous())
    install_packed(packed, out, gate_up=gate_up, decode=decode, digests=digests, status=status, **place._asdict())
    if status is not None:
        _mark(status, ~torch.isfinite(amax).all(), BAD_AMAX)


class Sinks(NamedTuple):
    """What an installation leaves behind beside the weights; see `install_packed`."""

    decode: Tensor | None = None
    digests: Tensor | None = None
    status: Tensor | None = None


class Destination:
    """Where stacks are installed again and again, by `install_packed` and `install_quantized` with these arguments.

    What is alike from one call to the next is looked at once: a call costs the host little more than its launch.
    """

    def __init__(self, out: Tensor, *, gate_up: bool, place: ShardPlace) -> None:
        self.out = out
        self.place = place
        self._gate_up = gate_up
        self._form: tuple[object, ...] = ()
        """Of the weights that came last."""
        self._args: _native.InstallArgs | None = None
        """What the kernel gets for weights of this form, or None if it does not take them."""
        self._sinks = Sinks()

    def install(self, weights: QuantizedStack | Tensor, amax: Tensor | None, sinks: Sinks) -> None:
        """Packed weights, also with their parts one after another (codes [E, P * N, K/2], scales alike), or float ones
        that are quantized with amax. Raises FormatError."""
        form: tuple[object, ...]
        if isinstance(weights, Tensor):
            assert amax is not None
            source, scales, scalars = weights, None, amax
            form = (source.shape, source.stride(), source.dtype, source.device,
                    amax.shape, amax.stride(), amax.dtype, amax.device)  # fmt: skip
        else:
            source, scales, scalars = weights
            form = (source.shape, source.stride(), source.dtype, source.device,
                    scales.shape, scales.stride(), scales.dtype, scales.device,
                    scalars.shape, scalars.stride(), scalars.dtype, scalars.device)  # fmt: skip
        if form != self._form:
            self._args, self._form = self._arguments(weights, scalars), form
        address, args = source.data_ptr(), self._args
        if args is None or address % 16:
            self._install_any(weights, scalars, sinks)
            return
        if sinks is not self._sinks:
            _check_sinks((args.experts, 2 if self._gate_up else 1), self.out.device, *sinks)
            args.decode, args.digests, args.status = map(_native.pointer, sinks)
            self._sinks = sinks
        args.source, args.scalars, args.blocks = address, scalars.data_ptr(), self.out.data_ptr()
        if scales is not None:
            args.scales = scales.data_ptr()
        _native.launch_install(args, scales is None, self.out.device)

    def _arguments(self, weights: QuantizedStack | Tensor, scalars: Tensor) -> _native.InstallArgs | None:
        """The kernel's arguments, but addresses of weights and sinks."""
        out, gate_up = _layout(self.out), self._gate_up
        if isinstance(weights, Tensor):
            w.check_weight(weights)
            _, form = _quantized_form(_layout(weights), _layout(_by_part(scalars, weights)), out, gate_up)
        else:
            _, form = _packed_form(*map(_layout, self._parted(weights)), out, gate_up)
        if form is None or not on_hopper(self.out):
            return None
        args = _native.InstallArgs.from_buffer_copy(form)
        args.row_offset, args.k_offset, args.count_global = self.place
        self._sinks = Sinks()
        return args

    def _install_any(self, weights: QuantizedStack | Tensor, scalars: Tensor, sinks: Sinks) -> None:
        arguments = sinks._asdict() | self.place._asdict()
        with torch.inference_mode():  # what was made in it can only be changed in it
            if isinstance(weights, Tensor):
                install_quantized(weights, scalars, self.out, gate_up=self._gate_up, **arguments)
            else:
                install_packed(self._parted(weights), self.out, gate_up=self._gate_up, **arguments)

    def _parted(self, packed: QuantizedStack) -> QuantizedStack:
        """Views with parts in a dimension of their own, if they are one after another."""
        if packed.codes.dim() != 3:
            return packed
        parts = 2 if self._gate_up else 1
        codes, scales, scalars = packed
        if codes.shape[1] % parts or scales.dim() != 3 or scales.shape[1] != codes.shape[1]:
            return packed  # which is refused
        return QuantizedStack(
            codes.unflatten(1, (parts, -1)),
            scales.unflatten(1, (parts, -1)),
            scalars[:, None] if scalars.dim() == 1 else scalars,
        )


def _by_part(amax: Tensor, weight: Tensor) -> Tensor:
    """amax [E] or [E, P] as [E, P]."""
    return amax[:, None].expand(weight.shape[:2]) if amax.shape == weight.shape[:1] else amax


def _mark(status: Tensor, found: Tensor, bit: int) -> None:
    status.bitwise_or_(found.to(torch.int32) * bit)


class _Layout(NamedTuple):
    """What is to be known of a tensor but its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _layout(t: Tensor) -> _Layout:
    return _Layout(t.shape, t.stride(), t.dtype, t.device)


# A refit installs stacks of few forms again and again: each is looked at once.


@functools.lru_cache(maxsize=1024)
def _packed_form(
    codes: _Layout, scales: _Layout, decode: _Layout, out: _Layout, gate_up: bool
) -> tuple[tuple[int, int], _native.InstallArgs | None]:
    """(E, P), and the kernel's arguments if it takes codes with such strides."""
    k = 2 * codes.shape[-1]
    lead = _lead(codes, out, k, gate_up)
    if (
        codes.dtype != torch.uint8
        or scales.dtype != torch.float8_e4m3fn
        or scales.shape != (*codes.shape[:3], k // BLOCK_SIZE)
        or scales.strides[-1] != 1
        or decode.dtype != torch.float32
        or decode.shape != codes.shape[:2]
        or {scales.device, decode.device} != {out.device}
    ):
        raise FormatError(
            f"codes {codes.dtype} {tuple(codes.shape)}, block scales {scales.dtype} {tuple(scales.shape)} and decode "
            f"scales {decode.dtype} {tuple(decode.shape)} do not belong together"
        )
    aligned = all(s % 8 == 0 for s in codes.strides[:3])
    return lead, _native.install_form(codes[:2], scales[:2], decode[:2], 1, gate_up) if aligned else None


@functools.lru_cache(maxsize=1024)
def _quantized_form(
    weight: _Layout, amax: _Layout, out: _Layout, gate_up: bool
) -> tuple[tuple[int, int], _native.InstallArgs | None]:
    """(E, P), and the kernel's arguments if it takes weights of this dtype with such strides."""
    lead = _lead(weight, out, weight.shape[-1], gate_up)
    if amax.dtype != torch.float32 or amax.shape != lead or amax.device != out.device:
        raise FormatError(
            f"amax is {amax.dtype} {tuple(amax.shape)} on {amax.device}, expected float32 {lead[:1]} or {lead} on "
            f"{out.device}"
        )
    aligned = weight.dtype == torch.bfloat16 and all(s % 8 == 0 for s in weight.strides[:3])
    return lead, _native.install_form(weight[:2], None, amax[:2], 2, gate_up) if aligned else None


def _lead(t: _Layout, out: _Layout, k: int, gate_up: bool) -> tuple[int, int]:
    """(E, P) of weights whose shape, and that of `out`, has been checked."""
    parts = 2 if gate_up else 1
    if len(t.shape) != 4 or t.shape[1] != parts or k % BLOCK_SIZE or t.strides[-1] != 1:
        raise FormatError(
            f"weights: have shape {tuple(t.shape)} and strides {t.strides}, expected [E, {parts}, N, K] without gaps "
            f"along K, a multiple of {BLOCK_SIZE}"
        )
    experts, _, rows, _ = t.shape
    blocks, size = arranged_shape(parts * rows, k)
    want = _Layout((experts, blocks, size), (blocks * size, size, 1), torch.uint8, t.device)
    if out != want:
        raise FormatError(
            f"prepared weights: are {out.dtype} {tuple(out.shape)} with strides {out.strides} on {out.device}, "
            f"expected contiguous uint8 {want.shape} on {t.device}"
        )
    return experts, parts


def _check_sinks(
    lead: tuple[int, int], device: torch.device, decode: Tensor | None, digests: Tensor | None, status: Tensor | None
) -> None:
    count = lead[0] * lead[1]
    for name, t, dtype, size in (
        ("decode", decode, torch.float32, count),
        ("digests", digests, torch.int64, count),
        ("status", status, torch.int32, 1),
    ):
        if t is not None and (t.dtype != dtype or t.numel() != size or not t.is_contiguous() or t.device != device):
            raise FormatError(
                f"{name}: is {t.dtype} {tuple(t.shape)} on {t.device}, expected {size} contiguous {dtype} on {device}"
            )
