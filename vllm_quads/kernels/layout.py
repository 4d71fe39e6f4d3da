# SPDX-License-Identifier: Apache-2.0
"""The weight layout of the Hopper kernels (csrc/weights.cuh), written and read back in plain torch.

Rows are cut into 64-row tiles, K into 64-wide blocks; each 64x64 block is 2048 bytes of codes and 256 bytes of block scales in
the order in which a warp's lanes consume them. Nothing is re-quantized: codes are permuted, and an E4M3 block scale
is re-coded as the upper bits of its FP16 form, which is one to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE, unpack_codes

ROW_TILE = 64
K_BLOCK = 64
BLOCK_BYTES = 2304
K_ALIGN = 256
"""K is padded to a multiple of this with zeros, so that four K groups of 64 divide it."""

# Position of each field of a 16-bit half: sign bit and lowest magnitude bit of fragment register a0..a3.
_SIGN_BIT = (15, 8, 7, 0)
_MAGNITUDE_BIT = (9, 12, 1, 4)


def padded_k(k: int) -> int:
    """K rounded up to the layout's alignment."""
    return -(-k // K_ALIGN) * K_ALIGN


def padded_rows(n: int) -> int:
    """Rows rounded up to whole row tiles."""
    return -(-n // ROW_TILE) * ROW_TILE


def gate_up_order(intermediate: int) -> Tensor:
    """Row order int64 [padded 2I] of w13 (gate rows, then up rows): each 16-row brick holds gate and up of 8 channels.

    Row g of a brick is gate, row g + 8 is up of the same channel, so one thread owns both. -1 marks padding.
    """
    channels = -(-intermediate // (ROW_TILE // 2)) * (ROW_TILE // 2)
    c = torch.arange(channels)
    gate = torch.where(c < intermediate, c, -1)
    up = torch.where(c < intermediate, c + intermediate, -1)
    return torch.stack((gate.view(-1, 8), up.view(-1, 8)), dim=1).flatten()


def pair_order(rows: int) -> Tensor:
    """Row order int64 [padded N] of other matrices: rows g and g + 8 of a brick are channels 2g and 2g + 1."""
    c = torch.arange(padded_rows(rows))
    c = torch.where(c < rows, c, -1)
    return c.view(-1, 8, 2).transpose(1, 2).flatten()


def arrange(codes: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """Packed weights of one matrix to the prepared layout.

    codes: uint8 [N, K/2] (low nibble = even k); scales: float8_e4m3fn [N, K/16]; order: int64 [padded N], source row of
    each prepared row or -1. Returns uint8 [row tiles, K blocks, 2304].
    """
    n, k = codes.shape[0], 2 * codes.shape[1]
    if k % BLOCK_SIZE or scales.shape != (n, k // BLOCK_SIZE):
        raise FormatError(f"codes {tuple(codes.shape)} and block scales {tuple(scales.shape)} do not belong together")
    device = codes.device
    order = order.to(device)
    kp, tiles, kb = padded_k(k), order.numel() // ROW_TILE, padded_k(k) // K_BLOCK
    source, padding = order.clamp(min=0), order < 0

    q = torch.zeros(order.numel(), kp, dtype=torch.uint8, device=device)
    q[:, :k] = unpack_codes(codes[source])
    q[padding] = 0
    # [tile, brick, row half, g, K block, k-step, k half, t, parity]
    q = q.view(tiles, 4, 2, 8, kb, 4, 2, 4, 2).to(torch.int32)
    word = torch.zeros(tiles, kb, 4, 8, 4, 4, dtype=torch.int64, device=device)  # tile, K block, brick, g, t, k-step
    for register in range(4):
        row_half, k_half = register & 1, register >> 1
        for parity in range(2):
            c = q[:, :, row_half, :, :, :, k_half, :, parity].permute(0, 3, 1, 2, 5, 4).to(torch.int64)
            word |= ((c >> 3) << (_SIGN_BIT[register] + 16 * parity)) | (
                (c & 7) << (_MAGNITUDE_BIT[register] + 16 * parity)
            )

    s = torch.zeros(order.numel(), kp // BLOCK_SIZE, dtype=torch.uint8, device=device)
    s[:, : k // BLOCK_SIZE] = _e5m3(scales)[source]
    s[padding] = 0
    s = (
        s.view(tiles, 4, 2, 8, kb, 2, 2).permute(0, 4, 1, 3, 5, 6, 2).to(torch.int64)
    )  # ..., brick, g, word, odd, row half
    even, odd = s[..., 0, :], s[..., 1, :]
    scale_word = (even[..., 0] << 7) | (even[..., 1] << 23) | (odd[..., 0] >> 1) | ((odd[..., 0] & 1) << 31)
    scale_word |= ((odd[..., 1] >> 1) << 16) | ((odd[..., 1] & 1) << 15)

    out = torch.cat((word.flatten(2), scale_word.flatten(2)), dim=-1)
    return _as_int32(out).contiguous().view(torch.uint8)


def restore(prepared: Tensor, order: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Inverse of `arrange`: codes uint8 [N, K/2] and block scales float8_e4m3fn [N, K/16]."""
    device = prepared.device
    order = order.to(device)
    tiles, kb = prepared.shape[0], prepared.shape[1]
    words = prepared.contiguous().view(torch.int32).view(tiles, kb, -1).to(torch.int64) & 0xFFFFFFFF
    word = words[..., :512].view(tiles, kb, 4, 8, 4, 4)
    q = torch.zeros(tiles, 4, 2, 8, kb, 4, 2, 4, 2, dtype=torch.uint8, device=device)
    for register in range(4):
        for parity in range(2):
            sign = (word >> (_SIGN_BIT[register] + 16 * parity)) & 1
            magnitude = (word >> (_MAGNITUDE_BIT[register] + 16 * parity)) & 7
            c = (sign << 3 | magnitude).permute(0, 2, 3, 1, 5, 4).to(torch.uint8)
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


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
