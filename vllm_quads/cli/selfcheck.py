# SPDX-License-Identifier: Apache-2.0
"""The self-check of `quads doctor`: fixed data through every implementation on a device, each byte compared.

The reference on a CPU is itself checked against digests that were recorded on another machine: a torch build or a
setting that flushes subnormals, fuses multiply-adds or rounds casts differently shows there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4 import (
    BlockScaleRule,
    PackedTensor,
    QuadsError,
    fingerprint,
    matrix_digest,
    packed_digest,
    quantize_activation,
    swizzle,
    unit_fingerprint,
)
from vllm_quads.nvfp4.formats import pack_codes

KNOWN = {
    "weight": "dffe100ade67082f",
    "max_to_six": "96d435e187c92663",
    "four_over_six": "485e653c6fc1675f",
    "swizzle": "bd50a22eae2fe526",
}
"""Fingerprints of what the reference computes from `sample`."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str
    kind: str = "environment"
    """`environment`, or `bits` for a comparison of bytes."""


def sample(rows: int = 64, k: int = 256) -> Tensor:
    """Fixed data without a random generator, BF16 [rows, k]: ordinary rows, one of amax 1e-5, zeros, a zero block."""
    i = torch.arange(rows * k, dtype=torch.int64)
    mixed = (i * 2654435761 + (i >> 3) * 40503) % 65521
    x = (mixed.to(torch.float32) / 65521.0 - 0.5) * (1 + (i % 7).to(torch.float32))
    x = x.reshape(rows, k)
    x[1] *= 1e-5
    x[2] = 0.0
    x[3, 16:32] = 0.0
    x[4] = torch.round(x[4] * 8)  # ties
    return x.to(torch.bfloat16)


def check_device(device: torch.device) -> list[Check]:
    """Every check that the device can run."""
    checks = [_run(f"reference on {device}", lambda: _reference(device))]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        checks.append(_run(f"quantization kernels on {device}", lambda: _kernels(device)))
    return checks


def _run(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        ok, detail = check()
    except (QuadsError, RuntimeError) as e:
        return Check(name, False, f"did not run: {' '.join(str(e).split())}")
    return Check(name, ok, detail, "bits")


def digests(device: torch.device) -> dict[str, str]:
    """Fingerprints of what the reference computes from `sample` on a device."""
    x = sample().to(device)
    out = {"weight": fingerprint({"w": int(packed_digest(PackedTensor.quantize(x)))})}
    for rule in BlockScaleRule:
        q = quantize_activation(x, rule=rule)
        parts = {
            "codes": int(matrix_digest(q.codes())),
            "scales": int(matrix_digest(q.scales)),
            "decode": int(matrix_digest(q.decode_scale)),
        }
        out[rule.value] = unit_fingerprint(parts)
    out["swizzle"] = unit_fingerprint({"s": int(matrix_digest(swizzle(quantize_activation(x).scales)))})
    return out


def _reference(device: torch.device) -> tuple[bool, str]:
    found = digests(device)
    wrong = [name for name in KNOWN if found[name] != KNOWN[name]]
    if wrong:
        return False, f"computes other bytes for {', '.join(wrong)}; is torch patched, or are subnormals flushed?"
    return True, f"{len(KNOWN)} digests as recorded"


def _kernels(device: torch.device) -> tuple[bool, str]:
    """The fused activation kernels against the reference, on the same device."""
    from vllm_quads.compensation import merged, quantize_with_residual
    from vllm_quads.kernels.quantize import quantize_merged, quantize_packed

    with torch.cuda.device(device):
        x = sample().to(device)
        for rule in BlockScaleRule:
            four = rule is BlockScaleRule.FOUR_OVER_SIX
            c = quantize_with_residual(x, rule=rule)
            got = quantize_packed(x, four_over_six=four)
            if not torch.equal(got.codes, pack_codes(c.main.codes())) or not _same(got.scales, c.main.scales):
                return False, f"packed codes or scales differ from the reference ({rule.value})"
            if not torch.equal(quantize_merged(x, four_over_six=four, full_all=True).values, merged(c)):
                return False, f"merged operands differ from the reference ({rule.value})"
    return True, "packed and merged operands equal the reference, byte for byte"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
