# SPDX-License-Identifier: Apache-2.0
"""The weight layout of the Hopper kernels (csrc/weights.cuh), written and read back in plain torch.

Rows are cut into 64-row tiles, K into 64-wide blocks; each 64x64 block is 2048 bytes of codes and 256 bytes of block
scales in the order in which a warp's lanes consume them; four row tiles form one contiguous group. Nothing is
re-quantized: codes are permuted and re-coded, and an E4M3 block scale becomes the upper bits of its FP16 form; both
are one to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Inverse of `arrange`, one matrix [blocks, 2304]: codes uint8 [N, K/2], block scales float8_e4m3fn [N, K/16]."""
    device = prepared.device
    order = order.to(device)
    tiles = order.numel() // ROW_TILE
    kb = prepared.shape[0] // tiles
    groups = prepared.split(GROUP_TILES * kb)
    blocks = torch.cat([g.view(kb, -1, BLOCK_BYTES).transpose(0, 1) for g in groups])
    words = blocks.contiguous().view(torch.int32).view(tiles, kb, -1).to(torch.int64) & 0xFFFFFFFF
    word = words[..., :512].view(tiles, kb, 4, 8, 4, 4)
    q = torch.zeros(tiles, 4, 2, 8, kb, 4, 2, 4, 2, dtype=torch.uint8, device=device)
    for register, views in enumerate(_VIEWS):
        bits = torch.zeros_like(word)
        for shift in views:
            bits ^= (word << shift if shift >= 0 else word >> -shift) & 0xFFFFFFFF
        for parity in range(2):
            half = bits >> (16 * parity)
            c = ((half >> 9 & 7) | (half >> 15 & 1) << 3).permute(0, 2, 3, 1, 5, 4).to(torch.uint8)
            q[:, :, register & 1, :, :, :, register >> 1, :, parity] = c
    w = words[..., 512:].view(tiles, kb, 4, 8, 2)
    low = torch.stack(((w >> 7) & 0xFF, ((w & 0x7F) << 1) | (w >> 31)), dim=-1)
    high = torch.stack(((w >> 23) & 0xFF, (((w >> 16) & 0x7F) << 1) | ((w >> 15) & 1)), dim=-1)
    s = torch.stack((low, high), dim=-1)  # tile, K block, brick, g, word, odd, row half
    s = s.permute(0, 2, 6, 3, 1, 4, 5).reshape(order.numel(), kb * 4)

    position = torch.empty(n, dtype=torch.int64, device=device)
    valid = order >= 0
    position[order[valid]] = torch.arange(order.numel(), device=device)[valid]
    codes = q.reshape(order.numel(), kb * K_BLOCK)[position][:, :k]
    scales = _from_e5m3(s[position][:, : k // BLOCK_SIZE])
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


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
