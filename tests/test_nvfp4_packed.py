# SPDX-License-Identifier: Apache-2.0
"""`PackedTensor`: shapes and dtypes checked at construction, values on request, statistics."""

from __future__ import annotations

import pytest
import torch

from vllm_quads.nvfp4 import FormatError, PackedTensor

E4M3 = torch.float8_e4m3fn


def _parts(n: int = 4, k: int = 32, lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {
        "codes": torch.zeros(*lead, n, k // 2, dtype=torch.uint8),
        "block_scales": torch.ones(*lead, n, k // 16).to(E4M3),
        "decode_scale": torch.ones(lead),
    }


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_valid_parts_are_accepted(lead: tuple[int, ...]) -> None:
    """Expert dimensions are optional; shape and nbytes are those of the logical matrix and of its three parts."""
    packed = PackedTensor(**_parts(lead=lead), name="w")
    assert packed.shape == (*lead, 4, 32)
    assert packed.nbytes == packed.codes.numel() + packed.block_scales.numel() + 4 * packed.decode_scale.numel()
    packed.check_values()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("codes", torch.zeros(4, 16, dtype=torch.int8), "codes is torch.int8, expected torch.uint8"),
        ("codes", torch.zeros(16, dtype=torch.uint8), r"codes have shape \(16,\)"),
        ("codes", torch.zeros(4, 12, dtype=torch.uint8), "K = 24 .* is not a multiple of 16"),
        ("codes", torch.zeros(4, 0, dtype=torch.uint8), "K = 0 .* is not a multiple of 16"),
        ("block_scales", torch.ones(4, 2), "block scale is torch.float32, expected torch.float8_e4m3fn"),
        ("block_scales", torch.ones(4, 3).to(E4M3), r"block scale has shape \(4, 3\), expected \(4, 2\)"),
        ("block_scales", torch.ones(2, 4).to(E4M3), r"block scale has shape \(2, 4\), expected \(4, 2\)"),
        ("decode_scale", torch.ones(1), r"global scale has shape \(1,\), expected \(\)"),
        ("decode_scale", torch.tensor(1.0, dtype=torch.bfloat16), "global scale is torch.bfloat16"),
    ],
)
def test_wrong_dtype_or_shape_is_refused_at_construction(field: str, value: torch.Tensor, message: str) -> None:
    """One clear error that names the tensor, what it is and what was expected."""
    with pytest.raises(FormatError, match=f"^layers.3.w: .*{message}"):
        PackedTensor(**{**_parts(), field: value}, name="layers.3.w")


@pytest.mark.parametrize(
    ("byte", "message"),
    [
        (0x7F, "1 block scales are NaN"),
        (0xFF, "1 block scales are NaN"),
        (0xB8, "1 block scales are negative"),
        (0x80, "negative"),
    ],
)
def test_bad_block_scale_is_found(byte: int, message: str) -> None:
    """NaN and negative block scales never reach a GEMM."""
    parts = _parts()
    parts["block_scales"].view(torch.uint8)[2, 1] = byte
    with pytest.raises(FormatError, match=message):
        PackedTensor(**parts).check_values()


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_bad_global_scale_is_found(value: float) -> None:
    """A global scale that is zero, negative or not finite is refused."""
    with pytest.raises(FormatError, match="global scale .* is not finite and positive"):
        PackedTensor(**{**_parts(), "decode_scale": torch.tensor(value)}).check_values()


def test_k_that_is_not_a_multiple_of_16_is_refused_before_quantizing() -> None:
    """The error names the tensor and the block size."""
    with pytest.raises(FormatError, match="w2: K = 24 is not a multiple of 16"):
        PackedTensor.quantize(torch.ones(4, 24), name="w2")


def test_block_statistics() -> None:
    """zero_blocks counts blocks that decode to zero (by code or by scale), saturated_blocks those at 448."""
    w = torch.ones(2, 64)
    w[0, 16:32] = 0.0  # zero codes and scale
    w[1, 0:16] = 1e-7  # scale underflows
    w[1, 16:32] = 0.5
    packed = PackedTensor.quantize(w)
    assert packed.zero_blocks() == 2
    assert packed.saturated_blocks() == 5
    assert packed.max_value() == pytest.approx(1.0)


def test_dequantize_is_code_times_scale_times_global() -> None:
    """A hand-made tensor decodes to the product that the formats define."""
    parts = _parts(1, 16)
    parts["codes"][0] = torch.tensor([0x21, 0x43, 0x65, 0x07, 0xA9, 0xCB, 0xED, 0x0F])
    parts["block_scales"] = torch.tensor([[1.5]]).to(E4M3)
    parts["decode_scale"] = torch.tensor(0.5)
    grid = [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    assert PackedTensor(**parts).dequantize()[0].tolist() == [v * 0.75 for v in grid]
