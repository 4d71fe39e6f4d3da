# SPDX-License-Identifier: Apache-2.0
"""`PackedTensor`: an NVFP4 weight as it is stored, sent and multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, E4M3_NAN_BYTE, pack_codes, unpack_codes
from vllm_quads.nvfp4.reference import decode_packed, quantize_weight, weight_amax


@dataclass(frozen=True)
class PackedTensor:
    """An NVFP4 weight [..., N, K]: leading dimensions (experts) are optional.

    Shapes and dtypes are checked at construction (FormatError); values by `check_values`.
    """

    codes: Tensor
    """uint8 [..., N, K/2]: two E2M1 codes a byte, low nibble = even k."""
    block_scales: Tensor
    """float8_e4m3fn [..., N, K/16], linear (not swizzled)."""
    decode_scale: Tensor
    """float32 [...]: the decode global scale 1/g of each [N, K] matrix; value = code * block scale * decode scale."""
    name: str = "weight"

    def __post_init__(self) -> None:
        for field, tensor, dtype in (
            ("codes", self.codes, torch.uint8),
            ("block scale", self.block_scales, torch.float8_e4m3fn),
            ("global scale", self.decode_scale, torch.float32),
        ):
            if tensor.dtype != dtype:
                raise FormatError(f"{self.name}: {field} is {tensor.dtype}, expected {dtype}")
        if self.codes.dim() < 2:
            raise FormatError(f"{self.name}: codes have shape {tuple(self.codes.shape)}, expected [..., N, K/2]")
        *lead, n, half_k = self.codes.shape
        if half_k == 0 or half_k % (BLOCK_SIZE // 2):
            raise FormatError(
                f"{self.name}: K = {2 * half_k} (from {tuple(self.codes.shape)}) is not a multiple of {BLOCK_SIZE}"
            )
        expected = (*lead, n, 2 * half_k // BLOCK_SIZE)
        if tuple(self.block_scales.shape) != expected:
            raise FormatError(
                f"{self.name}: block scale has shape {tuple(self.block_scales.shape)}, expected {expected} "
                f"for codes {tuple(self.codes.shape)}"
            )
        if tuple(self.decode_scale.shape) != tuple(lead):
            raise FormatError(
                f"{self.name}: global scale has shape {tuple(self.decode_scale.shape)}, expected {tuple(lead)} "
                f"(one per [N, K] matrix)"
            )

    @staticmethod
    def quantize(weight: Tensor, *, amax: Tensor | None = None, name: str = "weight") -> PackedTensor:
        """Quantize a weight [..., N, K]; see `reference.quantize_weight` for `amax` and the errors raised.

        NaN and Inf are refused (FormatError) also when `amax` is given.
        """
        if amax is not None:
            weight_amax(weight, name)
        q = quantize_weight(weight, amax=amax, name=name)
        return PackedTensor(pack_codes(q.codes()), q.scales, q.decode_scale[..., 0, 0].contiguous(), name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scales."""
        return self.codes.nbytes + self.block_scales.nbytes + self.decode_scale.nbytes

    def scaled(self) -> Tensor:
        """q * s in float32 [..., N, K]: what a GEMM multiplies with; exact in BF16 and FP16."""
        return decode_packed(unpack_codes(self.codes), self.block_scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(q * s) * decode scale, computed in float32 and rounded once to dtype; [..., N, K]."""
        return (self.scaled() * self.decode_scale[..., None, None]).to(dtype)

    def check_values(self) -> None:
        """Raise FormatError for a negative or NaN block scale, or a global scale that is not finite and positive."""
        raw = self.block_scales.view(torch.uint8)
        nan = (raw & 0x7F) == E4M3_NAN_BYTE
        if bool(nan.any()):
            raise FormatError(f"{self.name}: {int(nan.sum())} block scales are NaN; the checkpoint is damaged")
        # 0x80 is -0: harmless, but no writer produces it, so it is refused with the other negatives.
        if bool((raw >= 0x80).any()):
            raise FormatError(
                f"{self.name}: {int((raw >= 0x80).sum())} block scales are negative; "
                f"NVFP4 block scales are magnitudes (is this another scheme's file?)"
            )
        good = torch.isfinite(self.decode_scale) & (self.decode_scale > 0)
        if not bool(good.all()):
            raise FormatError(
                f"{self.name}: global scale {self.decode_scale[~good].flatten()[0].item()} is not finite and positive"
            )

    def zero_blocks(self) -> int:
        """Number of blocks that decode to zero."""
        nonzero_codes = (self.codes & 0x77).unflatten(-1, (-1, BLOCK_SIZE // 2)).amax(dim=-1) > 0
        return int((~nonzero_codes | ((self.block_scales.view(torch.uint8) & 0x7F) == 0)).sum())

    def saturated_blocks(self) -> int:
        """Number of blocks whose block scale is 448, the largest E4M3 value (one per matrix is normal)."""
        return int((self.block_scales.to(torch.float32) == E4M3_MAX).sum())

    def max_value(self) -> float:
        """Largest magnitude that this encoding can hold: 6 * 448 * decode scale."""
        return E2M1_MAX * E4M3_MAX * float(self.decode_scale.max())
