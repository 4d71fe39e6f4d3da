# SPDX-License-Identifier: Apache-2.0
"""The self-check of `quads doctor`, on the CPU and on a GPU: every device computes the recorded bytes."""

from __future__ import annotations

import pytest
import torch

from vllm_quads.cli.selfcheck import KNOWN, check_device, digests


def test_reference_on_cpu() -> None:
    """Weights, activations under both rules, and the swizzle have the recorded digests."""
    assert digests(torch.device("cpu")) == KNOWN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_reference_and_kernels_on_gpu() -> None:
    """The reference gives the same bytes on a GPU, and the kernels give the reference's."""
    checks = check_device(torch.device("cuda", 0))
    assert all(c.ok for c in checks), checks
