# SPDX-License-Identifier: Apache-2.0
"""The prepared weight layout holds every weight where the CUDA kernels look for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_quads.kernels._native import source_directory
from vllm_quads.kernels.layout import (
    _ENCODE,
    BLOCK_BYTES,
    _e5m3,
    arrange,
    arrange_into,
    arranged_shape,
    gate_up_order,
    padded_k,
    padded_rows,
    pair_order,
    restore,
    unarrange,
)
from vllm_quads.nvfp4 import FormatError, PackedTensor

SHAPES = [(128, 256), (192, 64), (576, 192), (96, 576), (1536, 512)]


def packed(n: int, k: int, seed: int = 0) -> PackedTensor:
    """Random weights whose block scales span the whole E4M3 range, subnormals and zero included."""
    gen = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 127, (n, k // 16), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    return PackedTensor(codes, scales, torch.tensor(1.0))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_preparation_is_lossless(n: int, k: int) -> None:
    """Codes and block scales come back byte for byte, for both row orders, tiles that N and K do not fill included."""
    w = packed(n, k)
    for order in (pair_order(n), *([gate_up_order(n // 2)] if n % 32 == 0 else [])):
        prepared = arrange(w.codes[None], w.block_scales[None], order)
        codes, scales = restore(prepared, order, n, k)
        assert torch.equal(codes[0], w.codes)
        assert torch.equal(scales[0].view(torch.uint8), w.block_scales.view(torch.uint8))


@pytest.mark.parametrize("gate_up", [False, True])
def test_arranging_in_place_and_back(gate_up: bool) -> None:
    """A stack and any range of it are arranged into given storage, and come back byte for byte into given storage; what
    does not fit is refused before anything is written."""
    experts, n, k = 3, 96, 80
    parts = [packed(n, k, seed) for seed in range(experts)]
    codes = torch.stack([w.codes for w in parts])
    scales = torch.stack([w.block_scales.view(torch.uint8) for w in parts]).view(torch.float8_e4m3fn)
    out = torch.full((experts, *arranged_shape(n, k)), 255, dtype=torch.uint8)
    assert arrange_into(codes, scales, out, gate_up=gate_up) is out
    assert torch.equal(out, arrange(codes, scales, gate_up_order(n // 2) if gate_up else pair_order(n)))
    whole = out.clone()
    out[1:2].fill_(0)
    arrange_into(codes[1:2], scales.view(torch.uint8)[1:2].view(torch.float8_e4m3fn), out[1:2], gate_up=gate_up)
    assert torch.equal(out, whole)
    back = (torch.zeros_like(codes), torch.zeros_like(scales))
    got = unarrange(out, n, k, gate_up=gate_up, codes=back[0], scales=back[1])
    assert got[0] is back[0]
    assert got[1] is back[1]
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1].view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(unarrange(out, n, k, gate_up=gate_up)[0], codes)
    for bad in (
        out[:2],
        out[:, 1:].contiguous(),
        out.to(torch.int16),
        out.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        with pytest.raises(FormatError, match="prepared weights"):
            arrange_into(codes, scales, bad, gate_up=gate_up)
    assert torch.equal(out, whole)


HOST = """
#include "arrange_math.cuh"
extern "C" void run(const unsigned* bytes, int groups, unsigned* word, unsigned* back,
                    const unsigned* scales, int words, unsigned* e5m3, unsigned* e4m3,
                    unsigned* encoded, unsigned* decoded) {
  using namespace quads;
  for (int i = 0; i < groups; ++i) {
    uint32_t w[4], a[4];
    encode_four(bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3], w);
    decode_four(w, a);
    for (int j = 0; j < 4; ++j) word[4 * i + j] = w[j], back[4 * i + j] = a[j];
  }
  for (int i = 0; i < words; ++i) {
    e5m3[i] = e5m3_four(scales[i]);
    e4m3[i] = e4m3_four(e5m3[i]);
    uint32_t w[2];
    encode_scales_of_block(scales[i], ~scales[i], w);
    for (int j = 0; j < 2; ++j) {
      uint32_t s[4];
      encoded[2 * i + j] = w[j];
      decode_scale_word(w[j], s);
      decoded[2 * i + j] = s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24;
    }
  }
}
"""


def test_the_layout_kernels_bit_operations(tmp_path: Path) -> None:
    """csrc/arrange_math.cuh, compiled for the host: words and scale bytes as torch makes them, and back; every pair of
    neighbouring scale bytes, of which some are converted four at a time and some one by one."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "host.cpp").write_text(HOST)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{source_directory()}"]
    subprocess.run([compiler, *flags, str(tmp_path / "host.cpp"), "-o", str(tmp_path / "host.so")], check=True)
    groups = 5000
    codes = np.random.default_rng(0).integers(0, 256, (groups, 4, 4), dtype=np.uint8)  # [group, register, word]
    pairs = np.stack(np.meshgrid(np.arange(128), np.arange(128)), axis=-1).reshape(-1, 2).astype(np.uint8)
    scales = np.concatenate((np.concatenate((pairs, pairs[::-1]), 1), np.concatenate((pairs, pairs * 0 + 80), 1)))
    word, back = np.zeros((groups, 4), np.uint32), np.zeros_like(codes)
    e5m3, e4m3 = np.zeros_like(scales), np.zeros_like(scales)
    encoded, decoded = np.zeros((len(scales), 2), np.uint32), np.zeros((len(scales), 2, 4), np.uint8)

    def at(a: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(a.ctypes.data)

    ctypes.CDLL(str(tmp_path / "host.so")).run(
        *(at(codes), groups, at(word), at(back), at(scales), len(scales)),
        *(at(e5m3), at(e4m3), at(encoded), at(decoded)),
    )
    assert np.array_equal(back, codes)
    want = np.zeros((groups, 4), np.uint32)
    for j in range(4):  # register j; low nibble: even k, low half
        for parity in range(2):
            nibble = codes[:, j] >> (4 * parity) & 15
            for i in range(4):
                want ^= np.where(nibble >> i & 1, np.uint32(_ENCODE[8 * j + 4 * parity + i]), np.uint32(0))
    assert np.array_equal(word, want)
    assert np.array_equal(e5m3, _e5m3(torch.from_numpy(scales).view(torch.float8_e4m3fn)).numpy())
    assert np.array_equal(e4m3, scales)
    low, high = scales.astype(np.uint32).reshape(-1, 2, 2), (~scales).astype(np.uint32).reshape(-1, 2, 2)
    for row, shift in ((low, 7), (high, 23)):  # FP16 bits 14..7 of either half of a word, and of the word rotated left
        rotated = encoded << np.uint32(8) | encoded >> np.uint32(24)
        assert np.array_equal(encoded >> np.uint32(shift) & np.uint32(255), row[..., 0])
        assert np.array_equal(rotated >> np.uint32(shift) & np.uint32(255), row[..., 1])
    rows = (scales.reshape(-1, 2, 2), (~scales).reshape(-1, 2, 2))
    assert np.array_equal(decoded, np.stack((rows[0][..., 0], rows[1][..., 0], rows[0][..., 1], rows[1][..., 1]), -1))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_experts_are_prepared_independently(n: int, k: int) -> None:
    """Preparing several experts at once gives each the bytes that it gets alone."""
    a, b = packed(n, k, 1), packed(n, k, 2)
    order = pair_order(n)
    both = arrange(
        torch.stack((a.codes, b.codes)),
        torch.stack((a.block_scales.view(torch.uint8), b.block_scales.view(torch.uint8))).view(torch.float8_e4m3fn),
        order,
    )
    for one, w in zip(both, (a, b), strict=True):
        assert torch.equal(one, arrange(w.codes[None], w.block_scales[None], order)[0])


def kernel_view(prepared: Tensor, rows: int, k: int) -> np.ndarray:
    """The matrix [rows, k] of q * s * 2^-14 as the kernels see it: csrc/weights.cuh, written out lane by lane."""
    raw = prepared.numpy()
    tiles, kblocks = rows // 64, k // 64
    out = np.zeros((rows, k), dtype=np.float32)
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    mask = np.uint32(0x8E008E00)
    for tile in range(tiles):
        first = tile // 4 * 4
        in_group = min(4, tiles - first)
        for kb in range(kblocks):
            block = raw[first * kblocks + kb * in_group + tile - first]
            for brick in range(4):
                words = block[brick * 512 : brick * 512 + 512].view(np.uint32).reshape(32, 4)
                scale_words = block[2048 + brick * 64 : 2048 + brick * 64 + 64].view(np.uint32).reshape(8, 2)
                for step in range(4):
                    sw = scale_words[g, step // 2]
                    if step % 2:
                        sw = (sw << np.uint32(8)) | (sw >> np.uint32(24))
                    halves = (sw & np.uint32(0x7F807F80)).view(np.uint16).reshape(32, 2).view(np.float16)
                    w = words[:, step]
                    registers = (
                        (w ^ (w >> np.uint32(3))) & mask,
                        (w ^ (w << np.uint32(2))) & mask,
                        (w << np.uint32(6)) & mask,
                        (w << np.uint32(9)) & mask,
                    )
                    for r, bits in enumerate(registers):
                        values = bits.view(np.uint16).reshape(32, 2).view(np.float16) * halves[:, r % 2 : r % 2 + 1]
                        row = tile * 64 + brick * 16 + g + 8 * (r % 2)
                        column = kb * 64 + step * 16 + 8 * (r // 2) + 2 * t
                        out[row, column], out[row, column + 1] = values[:, 0], values[:, 1]
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_register_decode_is_exact(n: int, k: int) -> None:
    """The kernels' bit operations and one FP16 multiplication give exactly q * s * 2^-14 everywhere; 0 in padding."""
    w = packed(n, k, 3)
    order = pair_order(n)
    seen = kernel_view(arrange(w.codes[None], w.block_scales[None], order)[0], order.numel(), padded_k(k))
    want = torch.zeros(order.numel(), padded_k(k))
    valid = order >= 0
    want[valid, :k] = w.scaled()[order[valid]] * 2.0**-14
    assert np.array_equal(seen, want.numpy())


def test_row_orders_are_what_the_epilogues_expect() -> None:
    """channel_of() of csrc/moe_params.cuh and the row orders agree, gate and up of a channel are 8 rows apart."""
    inter, hidden = 96, 320
    gate_up, pairs = gate_up_order(inter), pair_order(hidden)
    assert gate_up.numel() == padded_rows(2 * inter)
    for position in range(0, gate_up.numel(), 16):
        tile, brick = position // 64, position % 64 // 16
        for g in range(8):
            c = (tile // 2) * 64 + brick * 16 + 2 * g + tile % 2
            expected = (c, c + inter) if c < inter else (-1, -1)
            assert (int(gate_up[position + g]), int(gate_up[position + g + 8])) == expected
    for position in range(0, pairs.numel(), 16):
        tile, brick = position // 64, position % 64 // 16
        for g in range(8):
            c = (tile // 2) * 128 + brick * 32 + 4 * g + 2 * (tile % 2)
            expected = (c, c + 1) if c < hidden else (-1, -1)
            assert (int(pairs[position + g]), int(pairs[position + g + 8])) == expected


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    """Codes and scales of different matrices raise instead of being re-arranged into garbage."""
    w = packed(64, 64)
    with pytest.raises(FormatError, match="do not belong together"):
        arrange(w.codes[None], w.block_scales[None, :32], pair_order(64))
    assert arrange(w.codes[None], w.block_scales[None], pair_order(64)).shape[-1] == BLOCK_BYTES
