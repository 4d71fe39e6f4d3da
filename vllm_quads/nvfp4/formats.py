# SPDX-License-Identifier: Apache-2.0
"""Number formats of NVFP4: E2M1 codes, E4M3 block scales, and how codes are packed into bytes.

E2M1 is the OCP MX FP4 element format; NVFP4 gives each 16 elements along K one E4M3 block scale and
each tensor one FP32 global scale (NVIDIA, "Introducing NVFP4", 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError

BLOCK_SIZE = 16
"""Elements along K that share one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN_BYTE = 0x7F
FLT_MAX = torch.finfo(torch.float32).max

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of code `c & 7`; bit 3 is the sign."""


def e2m1_round(y: Tensor) -> Tensor:
    """Round float32 to the nearest E2M1 value, ties to even, saturating at ±6 (`cvt.rn.satfinite`).

    The sign of zero is kept. NaN stays NaN.
    """
    y = y.clamp(-E2M1_MAX, E2M1_MAX)  # keeps NaN
    # The E2M1 grid has steps of 0.5 below 2, 1 below 4 and 2 up to 6: half the power of two at or below the magnitude,
    # which is y/2 with its sign and fraction bits cleared. Dividing by a power of two is exact, so one
    # round-half-to-even on the scaled value is the correctly rounded result.
    step = (y * 0.5).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).clamp_(min=0.5)
    return y.div_(step).round_().mul_(step)


def e2m1_codes(values: Tensor) -> Tensor:
    """4-bit codes (uint8, `sign << 3 | magnitude`) of values that lie on the E2M1 grid. NaN gives code 0."""
    # Twice the magnitude is one of 0, 1, 2, 3, 4, 6, 8, 12; the table maps it to the code.
    table = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8, device=values.device)
    values = torch.nan_to_num(values, nan=0.0)  # a NaN's sign differs between devices
    return table[(values.abs() * 2.0).to(torch.int64)] | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of 4-bit codes held one per uint8."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype, device=codes.device)
    return table[codes.to(torch.int64)]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] into bytes [..., K/2]; the low nibble holds the even k."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: bytes [..., K/2] to codes [..., K]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def e4m3_round(x: Tensor) -> Tensor:
    """Round non-negative float32 to E4M3 (float8_e4m3fn), ties to even, saturating at 448. NaN stays NaN.

    Clamped first because `Tensor.to(float8_e4m3fn)` saturates in some torch releases and gives NaN in others.
    """
    rounded: Tensor = x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded


def check_k(k: int, name: str) -> None:
    """Raise FormatError unless K is a positive multiple of the block size."""
    if k <= 0 or k % BLOCK_SIZE:
        raise FormatError(
            f"{name}: K = {k} is not a multiple of {BLOCK_SIZE}, the NVFP4 block size; "
            f"keep this tensor in BF16 (add it to the contract's `ignore`) or pad the model"
        )


def blocks(x: Tensor) -> Tensor:
    """View [..., K] as [..., K/16, 16]."""
    view: Tensor = x.unflatten(-1, (-1, BLOCK_SIZE))
    return view
