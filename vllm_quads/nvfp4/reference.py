# SPDX-License-Identifier: Apache-2.0
"""The quant-dequant path: the one definition of QUADS' numerics, in plain torch.

Every other implementation (Triton, CUDA, FlashInfer) is bit-identical to these functions. The formula is
that of FlashInfer's exact mode (`FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1`) and of TransformerEngine's
NVFP4 quantizer (`core_nvfp4.cuh`). With block amax m and encode global scale g, in float32 with IEEE
rounding of every operation:

    sf = m * (g * f32(1/6))        s = e4m3_rne_sat(sf)
    o  = min(1 / (s * (1/g)), FLT_MAX)
    q  = e2m1_rne_sat(x * o)       value = (q * s) * (1/g)

q * s is exact in BF16 and in FP16, so a W4A4 GEMM is emulated exactly with 16-bit operands and both global
scales applied to the float32 accumulator.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError
from vllm_quads.nvfp4.formats import (
    BLOCK_SIZE,
    E4M3_MAX,
    FLT_MAX,
    blocks,
    check_k,
    e2m1_codes,
    e2m1_decode,
    e2m1_round,
    e4m3_round,
)

_ONE_SIXTH = 0.1666666716337204  # f32(1/6), written out so that every backend multiplies by the same number

FOUR_OVER_SIX_E4M3_MAX = 256.0
"""Largest block scale under four-over-six: leaves room for the 1.5x scale of blocks mapped to 4 (Cook et al., 2025)."""


class BlockScaleRule(str, Enum):
    """How a block's amax maps onto the E2M1 grid."""

    MAX_TO_SIX = "max_to_six"
    """amax maps to 6, the largest E2M1 value (the standard NVFP4 rule)."""
    FOUR_OVER_SIX = "four_over_six"
    """Per block, amax maps to 4 or to 6, whichever gives the smaller squared error."""

    @property
    def range(self) -> float:
        """Numerator of the encode global scale: what a tensor's amax maps to in scaled units."""
        return 6.0 * (E4M3_MAX if self is BlockScaleRule.MAX_TO_SIX else FOUR_OVER_SIX_E4M3_MAX)


class Quantized(NamedTuple):
    """Unpacked result of a quantization over the last dimension K."""

    values: Tensor
    """E2M1 values q, float32 [..., K]."""
    scales: Tensor
    """Block scales s, float8_e4m3fn [..., K/16]."""
    decode_scale: Tensor
    """1/g, float32, broadcastable to [..., 1]."""

    def scaled(self) -> Tensor:
        """q * s in float32 [..., K]: the GEMM operand, exact in BF16 and FP16, global scale not applied."""
        return (blocks(self.values) * self.scales.to(torch.float32).unsqueeze(-1)).flatten(-2)

    def dequantize(self) -> Tensor:
        """(q * s) * (1/g) in float32 [..., K]."""
        return self.scaled() * self.decode_scale

    def codes(self) -> Tensor:
        """4-bit codes, one per uint8 [..., K]."""
        return e2m1_codes(self.values)


def encode_scale(amax: Tensor, rule: BlockScaleRule = BlockScaleRule.MAX_TO_SIX) -> Tensor:
    """Encode global scale g = range / amax in float32, capped at FLT_MAX; 1 where amax is 0.

    NaN or Inf in amax gives a g that makes the whole tensor decode to NaN: garbage never becomes finite.
    """
    amax = amax.to(torch.float32)
    g = (torch.full_like(amax, rule.range) / amax).clamp(max=FLT_MAX)
    return torch.where(amax == 0, torch.ones_like(g), g)


def quantize_blocks(x: Tensor, g: Tensor, rule: BlockScaleRule = BlockScaleRule.MAX_TO_SIX) -> Quantized:
    """Quantize [..., K] with encode global scale g (float32, broadcastable to [..., 1]).

    A zero block gets scale 0 and codes 0. A block that holds a NaN or Inf gets the NaN block scale, so that it
    decodes to NaN. Raises FormatError if K is not a multiple of 16.
    """
    check_k(x.shape[-1], "quantize_blocks")
    g = g.to(torch.float32)
    xb = blocks(x.to(torch.float32))
    m = xb.abs().amax(dim=-1)
    decode = torch.ones_like(g) / g
    sf = m * (g * _ONE_SIXTH)
    # One NaN pattern (0x7F) whatever sign the hardware gives its NaNs; both comparisons are false for NaN.
    sf = torch.where((m < torch.inf) & (sf >= 0), sf, torch.nan)
    if rule is BlockScaleRule.MAX_TO_SIX:
        values, scales = _encode(xb, m, sf, decode)
        return Quantized(values.flatten(-2), scales, decode)
    # Both candidates at once, on a new leading dimension: amax to 6, amax to 4.
    values, scales = _encode(xb, m, torch.stack((sf, sf * 1.5)), decode)
    error = _block_error(xb, values, scales, decode)
    four = error[1] < error[0]
    raw = scales.view(torch.uint8)  # where() has no float8 kernel
    return Quantized(
        torch.where(four.unsqueeze(-1), values[1], values[0]).flatten(-2),
        torch.where(four, raw[1], raw[0]).view(torch.float8_e4m3fn),
        decode,
    )


def _encode(xb: Tensor, m: Tensor, sf: Tensor, decode: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 values [..., K/16, 16] and block scales [..., K/16] of blocks xb with amax m and unrounded scales sf."""
    scales = e4m3_round(sf)
    o = (1.0 / (scales.to(torch.float32) * decode)).clamp_(max=FLT_MAX)
    # A zero block is 0 * 0 + 0, which is +0 whatever the signs in xb; x * o + (-0) is x * o for every other block.
    zero = m == 0
    o = torch.where(zero, 0.0, o)
    sign = torch.where(zero, 0.0, torch.full_like(m, -0.0))
    return e2m1_round((xb * o.unsqueeze(-1)).add_(sign.unsqueeze(-1))), scales


def _block_error(xb: Tensor, values: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    """Squared error of each block [..., K/16], summed in a fixed order (halves) that kernels can repeat."""
    e = (values * scales.to(torch.float32).unsqueeze(-1)).mul_(decode.unsqueeze(-1))
    e = torch.sub(xb, e, out=e).square_()
    while e.shape[-1] > 1:
        half = e.shape[-1] // 2
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)


def quantize_activation(
    x: Tensor,
    *,
    g: Tensor | None = None,
    rule: BlockScaleRule = BlockScaleRule.MAX_TO_SIX,
    center: Tensor | None = None,
) -> Quantized:
    """Quantize activations [M, K] (any float dtype) as the rollout does, online.

    g is the static encode global scale (float32 scalar or [M, 1]); None means one per token, from the row's
    amax after centring. `center` is a float32 channel vector [K] subtracted first; its product with the weight
    is added back as a bias by the caller.
    """
    x = x.to(torch.float32)
    if center is not None:
        x = x - center
    if g is None:
        g = encode_scale(x.abs().amax(dim=-1, keepdim=True), rule)
    return quantize_blocks(x, g, rule)


def weight_amax(weight: Tensor, name: str = "weight") -> Tensor:
    """max |W| of the BF16 copy over the last two dimensions, float32 [...].

    Rounding is monotone, so the rounded amax of an FP32 master is the amax of its BF16 copy. Raises FormatError on
    NaN or Inf, naming the tensor.
    """
    amax = weight.detach().abs().amax(dim=(-2, -1)).to(torch.bfloat16).to(torch.float32)
    if not bool(torch.isfinite(amax).all()):
        raise FormatError(
            f"{name}: holds NaN or Inf, which NVFP4 cannot represent; the model has diverged or the file is damaged"
        )
    return amax


def quantize_weight(weight: Tensor, *, amax: Tensor | None = None, name: str = "weight") -> Quantized:
    """Quantize a weight [..., N, K] with one global scale per [N, K] matrix.

    The master weight is rounded to BF16 first, so that an FP32 master and the BF16 copy that a rollout
    receives give the same bytes. `amax` [...] is the amax that the global scale is taken from (siblings that share
    a scale, shards of a larger tensor, or a frozen scale); None means that of the matrix itself.
    """
    check_k(weight.shape[-1], name)
    w = weight.detach().to(torch.bfloat16)
    if amax is None:
        amax = weight_amax(w, name)
    return quantize_blocks(w, encode_scale(amax)[..., None, None])


def fake_quantize_weight(weight: Tensor, *, amax: Tensor | None = None, name: str = "weight") -> Tensor:
    """Quantize and dequantize a weight [..., N, K]; the result has the weight's dtype."""
    return quantize_weight(weight, amax=amax, name=name).dequantize().to(weight.dtype)


def decode_packed(codes: Tensor, scales: Tensor) -> Tensor:
    """q * s in float32 [..., K] from unpacked uint8 codes [..., K] and E4M3 block scales [..., K/16]."""
    if codes.shape[-1] != scales.shape[-1] * BLOCK_SIZE:
        raise FormatError(f"{codes.shape[-1]} codes along K do not match {scales.shape[-1]} block scales")
    return (blocks(e2m1_decode(codes)) * scales.to(torch.float32).unsqueeze(-1)).flatten(-2)
