# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for weights give the reference's bits: in Triton's interpreter here, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from weight_kernel_checks import CHECKS

from vllm_quads.kernels import weights as kernels
from vllm_quads.kernels.tensors import digest_tensors
from vllm_quads.nvfp4.errors import FormatError


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """Name of each check -> its traceback in Triton's interpreter."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    script = Path(__file__).with_name("weight_kernel_checks.py")
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    results: dict[str, str | None] = json.loads(run.stdout)
    return results


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, interpreted: dict[str, str | None]) -> None:
    """Bit-identical to the reference in Triton's interpreter."""
    failure = interpreted[name]
    if failure is not None and "only 0-dimensional arrays can be converted" in failure:
        pytest.skip("this release of Triton's interpreter does not know this release of numpy")
    assert failure is None, failure


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name: str) -> None:
    """Bit-identical to the reference on the GPU."""
    CHECKS[name]("cuda")


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "every_magnitude"])
def test_fallback(name: str) -> None:
    """Without a GPU the same functions run the reference."""
    CHECKS[name]("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_nothing_waits_for_the_device() -> None:
    """No function synchronizes; only FiniteCheck.check and TensorDigests.read do."""
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    finite = kernels.FiniteCheck()

    def work() -> None:
        amax = kernels.weight_amax(w)
        finite.add("w", amax)
        packed = kernels.quantize_stack(w, amax)
        kernels.fake_quantize_stack(w, amax)
        kernels.dequantize_stack(packed)
        kernels.clamp_gradient(w, w, amax)
        kernels.digest_stack(packed)
        digest_tensors([w, w[0].t(), w[0, 0, :3]])

    work()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    finite.check()


def test_refusals() -> None:
    """Shapes and dtypes that do not fit are named."""
    w = torch.zeros(2, 4, 32)
    with pytest.raises(FormatError, match="K = 24 is not a multiple of 16"):
        kernels.weight_amax(torch.zeros(2, 24))
    with pytest.raises(FormatError, match=r"amax is torch.float32 \(\), expected float32 \(2,\)"):
        kernels.quantize_stack(w, torch.tensor(1.0))
    out = kernels.QuantizedStack(torch.zeros(2, 4, 8, dtype=torch.uint8), w, w)
    with pytest.raises(FormatError, match=r"codes is torch.uint8 \(2, 4, 8\)"):
        kernels.quantize_stack(w, torch.ones(2), out=out)
    with pytest.raises(FormatError, match="output is torch.bfloat16"):
        kernels.fake_quantize_stack(w, torch.ones(2), out=w.bfloat16())
