# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a layer's time: the bytes it must read and the FLOPs it must do. Pure arithmetic."""

from __future__ import annotations

from vllm_quads.bench.shapes import MoEShape
from vllm_quads.nvfp4.formats import BLOCK_SIZE

NVFP4_BITS = 4 + 8 / BLOCK_SIZE
"""4.5: a 4-bit code and a sixteenth of an 8-bit block scale."""
BITS = {"NVFP4": NVFP4_BITS, "FP8": 8.0}
"""Bits per weight."""


def expected_hit(experts: int, top_k: int, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens use under uniform routing without replacement."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def weight_bytes_us(shape: MoEShape, experts_hit: float, bits: float, bandwidth: float) -> float:
    """Microseconds to read the weights of `experts_hit` experts once at `bandwidth` bytes/s."""
    return experts_hit * shape.weights_per_expert * bits / 8 / bandwidth * 1e6


def flops_us(shape: MoEShape, tokens: int, flops: float) -> float:
    """Microseconds of the layer's multiply-adds at `flops` FLOP/s: 2 per weight and (token, expert) pair."""
    return 2 * shape.weights_per_expert * tokens * shape.top_k / flops * 1e6


def quantize_bytes(rows: int, k: int) -> int:
    """Bytes that quantization in the merged form moves: 16 bits in, 16 bits and a scale for each row out."""
    return rows * k * (2 + 2) + rows * 4
