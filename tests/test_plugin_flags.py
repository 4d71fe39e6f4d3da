# SPDX-License-Identifier: Apache-2.0
"""What a device finds while weights are written: the first bad value of each kind is the one that is named."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("vllm")

from vllm_quads.kernels.install import BAD_AMAX, BAD_GLOBAL, BAD_SCALE
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.flags import Flags

KINDS = {
    "amax": (torch.float32, [0.0, 1e-45, 3e38], [math.nan, math.inf]),
    "global": (torch.float32, [1e-45, 1.0, 3e38], [math.nan, math.inf, -math.inf, 0.0, -1e-45]),
    "scale": (torch.uint8, [0, 1, 0x7E], [0x7F, 0x80, 0xFF]),
    "bad scale": (torch.int32, [0, BAD_GLOBAL, BAD_AMAX, 8], [BAD_SCALE, BAD_SCALE | BAD_GLOBAL]),
    "bad global": (torch.int32, [0, BAD_SCALE, BAD_AMAX, 8], [BAD_GLOBAL, BAD_GLOBAL | BAD_AMAX]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_bad_value_is_named(kind: str) -> None:
    """Good values of all kinds pass; one bad value among them, wherever it is, is found, and no flag is left."""
    dtype, good, bad = KINDS[kind]
    flags = Flags()

    def watch(values: list[float]) -> None:
        for other, (d, fine, _) in KINDS.items():
            flags.add(other, torch.tensor(fine, dtype=d), f"{other}: good")
        flags.add(kind, torch.tensor([], dtype=dtype), "empty")
        flags.add(kind, torch.tensor(values, dtype=dtype).view(-1, 1), lambda i: f"{kind}: {i}")
        flags.add(kind, torch.tensor(good if values == good else bad, dtype=dtype), "late")

    for value in bad:
        for place in range(len(good) + 1):
            watch([*good[:place], value, *good[place:]])
            with pytest.raises(RefitError, match=f"^{kind}: {place}$"):
                flags.check()
            flags.check()
    watch(good)
    flags.check()
    flags.add(kind, torch.tensor(bad[0], dtype=dtype), "alone")
    with pytest.raises(RefitError, match="^alone$"):
        flags.check()


def test_dtypes_of_weights() -> None:
    """An amax in FP16 that BF16 weights exceed is found beside those of other dtypes."""
    flags = Flags()
    flags.add("amax", torch.tensor(1e5, dtype=torch.bfloat16), "fits")
    flags.add("amax", torch.tensor(1e5).to(torch.float16), "does not")
    with pytest.raises(RefitError, match="^does not$"):
        flags.check()
