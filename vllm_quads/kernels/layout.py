# SPDX-License-Identifier: Apache-2.0
"""The weight layout of the Hopper kernels (csrc/weights.cuh): written and read back by a kernel or in plain torch.

    arrange_into(codes, scales, out, gate_up=...)    packed checkpoint layout -> prepared layout
    unarrange(prepared, rows, k, gate_up=...)        and back, exactly

Rows are cut into 64-row tiles, K into 64-wide blocks; each 64x64 block is 2048 bytes of codes and 256 bytes of block
scales in the order in which a warp's lanes consume them; four row tiles form one contiguous group. Nothing is
re-quantized: codes are permuted and re-coded, and an E4M3 block scale becomes the upper bits of its FP16 form; both
are one to one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_quads.kernels import _native
from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE, unpack_codes

ROW_TILE = 64
K_BLOCK = 64
BLOCK_BYTES = 2304
GROUP_TILES = 4
"""Row tiles that form one contiguous run [K blocks, row tiles] of blocks."""
K_ALIGN = 256
"""K is padded to a multiple of this with zeros, so that four K groups of 64 divide it."""

# A word's four fragment registers, each `(w ^ shifted w) & mask` or `shifted w & mask` (left shifts; see weights.cuh).
_MASK_BITS = (9, 10, 11, 15, 25, 26, 27, 31)
_VIEWS = ((0, -3), (0, 2), (6,), (9,))


def _decode_rows() -> list[int]:
    """The bits of the four registers as sums over GF(2) of word bits: entry 8 r + i masks those of mask bit i."""
    rows = []
    for views in _VIEWS:
        for bit in _MASK_BITS:
            row = 0
            for shift in views:
                if 0 <= bit - shift < 32:
                    row ^= 1 << (bit - shift)
            rows.append(row)
    return rows


def _encode_columns() -> list[int]:
    """Inverse of `_decode_rows`: column j is the word that decodes to register bit j alone."""
    rows = [(row, 1 << i) for i, row in enumerate(_decode_rows())]
    for bit in range(32):
        pivot = next(i for i in range(bit, 32) if rows[i][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        for i in range(32):
            if i != bit and rows[i][0] >> bit & 1:
                rows[i] = (rows[i][0] ^ rows[bit][0], rows[i][1] ^ rows[bit][1])
    # rows[bit][1] now says which register bits sum to word bit `bit`.
    return [sum((rows[bit][1] >> j & 1) << bit for bit in range(32)) for j in range(32)]


_ENCODE = _encode_columns()


def padded_k(k: int) -> int:
    """K rounded up to the layout's alignment."""
    return -(-k // K_ALIGN) * K_ALIGN


def padded_rows(n: int) -> int:
    """Rows rounded up to whole pairs of row tiles."""
    return -(-n // (2 * ROW_TILE)) * 2 * ROW_TILE


def gate_up_order(intermediate: int) -> Tensor:
    """Row order int64 [padded 2I] of w13 (gate rows, then up rows); -1 marks padding.

    Rows g and g + 8 of a 16-row brick are gate and up of one channel, so that one thread owns both; two adjacent row
    tiles interleave their channels, so that one thread of the wgmma kernel writes adjacent channels.
    """
    # [tile pair, brick, g, tile of the pair] -> channel
    c = torch.arange(padded_rows(2 * intermediate) // 2).view(-1, 4, 8, 2)
    gate = torch.where(c < intermediate, c, -1)
    up = torch.where(c < intermediate, c + intermediate, -1)
    # -> [tile pair, tile of the pair, brick, gate or up, g]
    return torch.stack((gate, up)).permute(1, 4, 2, 0, 3).flatten()


def pair_order(rows: int) -> Tensor:
    """Row order int64 [padded N] of other matrices: rows g and g + 8 of a brick are adjacent channels; -1: padding."""
    c = torch.arange(padded_rows(rows))
    c = torch.where(c < rows, c, -1)
    # [tile pair, brick, g, tile of the pair, row half] -> [tile pair, tile of the pair, brick, row half, g]
    return c.view(-1, 4, 8, 2, 2).permute(0, 3, 1, 4, 2).flatten()


def arrange(codes: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """Packed weights of E matrices to the prepared layout.

    codes: uint8 [E, N, K/2] (low nibble = even k); scales: float8_e4m3fn [E, N, K/16]; order: int64 [padded N], source
    row of each prepared row or -1. Returns uint8 [E, row tiles * K blocks, 2304].
    """
    experts, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    if k % BLOCK_SIZE or scales.shape != (experts, n, k // BLOCK_SIZE):
        raise FormatError(f"codes {tuple(codes.shape)} and block scales {tuple(scales.shape)} do not belong together")
    device = codes.device
    order = order.to(device)
    kp, tiles, kb = padded_k(k), order.numel() // ROW_TILE, padded_k(k) // K_BLOCK
    source, padding = order.clamp(min=0), order < 0

    q = torch.zeros(experts, order.numel(), kp, dtype=torch.uint8, device=device)
    q[..., :k] = unpack_codes(codes[:, source])
    q[:, padding] = 0
    # [expert, tile, brick, row half, g, K block, k-step, k half, t, parity]
    q = q.view(experts, tiles, 4, 2, 8, kb, 4, 2, 4, 2)
    # [expert, tile, K block, brick, g, t, k-step]
    word = torch.zeros(experts, tiles, kb, 4, 8, 4, 4, dtype=torch.int32, device=device)
    for register in range(4):
        for parity in range(2):
            c = q[:, :, :, register & 1, :, :, :, register >> 1, :, parity].permute(0, 1, 4, 2, 3, 6, 5).to(torch.int32)
            for i in range(4):
                # bits 0..2 of a code are the magnitude at mask bits 9..11, bit 3 is the sign at bit 15
                column = _signed(_ENCODE[8 * register + 4 * parity + i])
                word ^= -(c >> i & 1) & column

    s = torch.zeros(experts, order.numel(), kp // BLOCK_SIZE, dtype=torch.uint8, device=device)
    s[..., : k // BLOCK_SIZE] = _e5m3(scales)[:, source]
    s[:, padding] = 0
    # [expert, tile, K block, brick, g, word, odd, row half]
    s = s.view(experts, tiles, 4, 2, 8, kb, 2, 2).permute(0, 1, 5, 2, 4, 6, 7, 3).to(torch.int64)
    even, odd = s[..., 0, :], s[..., 1, :]
    scale_word = (even[..., 0] << 7) | (even[..., 1] << 23) | (odd[..., 0] >> 1) | ((odd[..., 0] & 1) << 31)
    scale_word |= ((odd[..., 1] >> 1) << 16) | ((odd[..., 1] & 1) << 15)
    blocks = torch.cat((word.flatten(3), _as_int32(scale_word).flatten(3)), dim=-1).view(torch.uint8)
    groups = [g.transpose(1, 2).reshape(experts, -1, BLOCK_BYTES) for g in blocks.split(GROUP_TILES, dim=1)]
    return torch.cat(groups, dim=1)


def restore(prepared: Tensor, order: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Inverse of `arrange`: [E, blocks, 2304] to codes uint8 [E, N, K/2], block scales float8_e4m3fn [E, N, K/16]."""
    device, experts = prepared.device, prepared.shape[0]
    order = order.to(device)
    tiles = order.numel() // ROW_TILE
    kb = prepared.shape[1] // tiles
    groups = prepared.split(GROUP_TILES * kb, dim=1)
    blocks = torch.cat([g.reshape(experts, kb, -1, BLOCK_BYTES).transpose(1, 2) for g in groups], dim=1)
    words = blocks.contiguous().view(torch.int32).view(experts, tiles, kb, -1).to(torch.int64) & 0xFFFFFFFF
    # [expert, tile, K block, brick, g, t, k-step]
    word = words[..., :512].reshape(experts, tiles, kb, 4, 8, 4, 4)
    q = torch.zeros(experts, tiles, 4, 2, 8, kb, 4, 2, 4, 2, dtype=torch.uint8, device=device)
    for register, views in enumerate(_VIEWS):
        bits = torch.zeros_like(word)
        for shift in views:
            bits ^= (word << shift if shift >= 0 else word >> -shift) & 0xFFFFFFFF
        for parity in range(2):
            half = bits >> (16 * parity)
            c = ((half >> 9 & 7) | (half >> 15 & 1) << 3).permute(0, 1, 3, 4, 2, 6, 5).to(torch.uint8)
            q[:, :, :, register & 1, :, :, :, register >> 1, :, parity] = c
    w = words[..., 512:].reshape(experts, tiles, kb, 4, 8, 2)
    low = torch.stack(((w >> 7) & 0xFF, ((w & 0x7F) << 1) | (w >> 31)), dim=-1)
    high = torch.stack(((w >> 23) & 0xFF, (((w >> 16) & 0x7F) << 1) | ((w >> 15) & 1)), dim=-1)
    s = torch.stack((low, high), dim=-1)  # expert, tile, K block, brick, g, word, odd, row half
    s = s.permute(0, 1, 3, 7, 4, 2, 5, 6).reshape(experts, order.numel(), kb * 4)

    position = torch.empty(n, dtype=torch.int64, device=device)
    valid = order >= 0
    position[order[valid]] = torch.arange(order.numel(), device=device)[valid]
    codes = q.reshape(experts, order.numel(), kb * K_BLOCK)[:, position, :k]
    scales = _from_e5m3(s[:, position, : k // BLOCK_SIZE])
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def arranged_shape(rows: int, k: int) -> tuple[int, int]:
    """Blocks and bytes a block of one prepared matrix [rows, k]: the trailing shape of `arrange_into`'s output."""
    return padded_rows(rows) // ROW_TILE * (padded_k(k) // K_BLOCK), BLOCK_BYTES


def row_order(rows: int, *, gate_up: bool) -> Tensor:
    """`gate_up_order` of a w13 with `rows` = 2I, or `pair_order` of any other matrix."""
    return gate_up_order(rows // 2) if gate_up else pair_order(rows)


def arrange_into(codes: Tensor, scales: Tensor, out: Tensor, *, gate_up: bool) -> Tensor:
    """`arrange` into existing storage; a stack of E matrices or, sliced along dim 0, any range of one.

    codes: uint8 [E, N, K/2] (low nibble = even k); scales: float8_e4m3fn [E, N, K/16]; out: uint8
    [E, *arranged_shape(N, K)]; all contiguous. gate_up: the rows are I of gate and I of up (w13). On a Hopper GPU it is
    one kernel on the current stream, capturable in a CUDA graph; elsewhere plain torch; the same bytes either way.
    Returns out. Raises FormatError for shapes that do not belong together.
    """
    _check_arranged(codes, scales, out, gate_up)
    experts, rows, half_k = codes.shape
    if on_hopper(codes):
        parts = (experts, 2 if gate_up else 1, -1)
        source, steps = codes.view(*parts, half_k), scales.view(*parts, scales.shape[-1])
        form = _native.install_form((source.shape, source.stride()), (steps.shape, steps.stride()), None, 1, gate_up)
        _native.install(form, source, steps, None, out)
        return out
    order = row_order(rows, gate_up=gate_up)
    chunk = max(1, _CHUNK_CODES // max(1, rows * 2 * half_k))
    for first in range(0, experts, chunk):
        part = slice(first, first + chunk)
        # float8 tensors are cut through a view: some torch releases cannot index them
        out[part].copy_(arrange(codes[part], scales.view(torch.uint8)[part].view(torch.float8_e4m3fn), order))
    return out


def unarrange(
    prepared: Tensor,
    rows: int,
    k: int,
    *,
    gate_up: bool,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact inverse of `arrange_into`: codes uint8 [E, rows, k/2] and block scales float8_e4m3fn [E, rows, k/16].

    prepared: uint8 [E, *arranged_shape(rows, k)], contiguous. Existing `codes` and `scales` are written in place. Block
    scales come back without a sign (they have none in NVFP4).
    """
    experts, device = prepared.shape[0], prepared.device
    if codes is None:
        codes = torch.empty(experts, rows, k // 2, dtype=torch.uint8, device=device)
    if scales is None:
        scales = torch.empty(experts, rows, k // BLOCK_SIZE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    _check_arranged(codes, scales, prepared, gate_up)
    if codes.shape[1:] != (rows, k // 2):
        raise FormatError(f"codes: have shape {tuple(codes.shape)}, expected {(experts, rows, k // 2)}")
    if on_hopper(prepared):
        _native.unarrange(codes, scales, prepared, k, gate_up)
        return codes, scales
    order = row_order(rows, gate_up=gate_up)
    chunk = max(1, _CHUNK_CODES // max(1, rows * k))
    for first in range(0, experts, chunk):
        part = slice(first, first + chunk)
        got_codes, got_scales = restore(prepared[part], order, rows, k)
        codes[part].copy_(got_codes)
        scales.view(torch.uint8)[part].copy_(got_scales.view(torch.uint8))
    return codes, scales


_CHUNK_CODES = 1 << 25
"""Codes that the torch path arranges at a time: bounds its scratch memory to about 0.5 GB."""


def _check_arranged(codes: Tensor, scales: Tensor, out: Tensor, gate_up: bool) -> None:
    if codes.dim() != 3 or codes.shape[2] % (BLOCK_SIZE // 2):
        raise FormatError(f"codes: have shape {tuple(codes.shape)}, expected [E, N, K/2] with K a multiple of 16")
    experts, rows, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    if scales.shape != (experts, rows, k // BLOCK_SIZE):
        raise FormatError(f"codes {tuple(codes.shape)} and block scales {tuple(scales.shape)} do not belong together")
    if out.shape != (experts, *arranged_shape(rows, k)):
        raise FormatError(
            f"prepared weights: have shape {tuple(out.shape)}, expected {(experts, *arranged_shape(rows, k))} for "
            f"codes {tuple(codes.shape)}"
        )
    if gate_up and rows % 2:
        raise FormatError(f"codes: {rows} rows cannot be as many of gate as of up")
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.uint8)
    for name, t, dtype in zip(("codes", "block scales", "prepared weights"), (codes, scales, out), dtypes, strict=True):
        if t.dtype is not dtype or not t.is_contiguous() or t.device != codes.device:
            raise FormatError(
                f"{name}: {t.dtype} on {t.device}, contiguous: {t.is_contiguous()}; expected contiguous {dtype} on "
                f"{codes.device}"
            )


def on_hopper(x: Tensor) -> bool:
    """True if the kernels of csrc/ run where the tensor is."""
    return x.is_cuda and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _e5m3(scales: Tensor) -> Tensor:
    half = scales.to(torch.float16).view(torch.int16).to(torch.int32)
    return ((half >> 7) & 0xFF).to(torch.uint8)


def _from_e5m3(raw: Tensor) -> Tensor:
    half = (raw.to(torch.int32) << 7).to(torch.int16).view(torch.float16)
    return half.to(torch.float32).to(torch.float8_e4m3fn)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def by_chunk(vector: Tensor, out: Tensor | None = None) -> Tensor:
    """A centring vector [K] in the order in which quantization reads it: channels 0-3 of every 16-channel block, then
    4-7, 8-11 and 12-15. `out`: where it goes, so that captured graphs see it."""
    ordered = vector.view(-1, 4, 4).transpose(0, 1).reshape(-1)
    return ordered if out is None else out.copy_(ordered)
