# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources of the four GEMM kernels, run on the CPU: mbarriers, copies, mma and wgmma as functions of the host.

Threads are the host's, so hand-offs between producers and consumers really run side by side: a missing arrival, a slot
that is written too early and a wrong fragment all show.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_kernels_emulated import _cuda_include

from vllm_quads.kernels._native import GemmArgs, source_directory
from vllm_quads.kernels.layout import arrange_into, arranged_shape, padded_k, padded_rows
from vllm_quads.nvfp4 import PackedTensor

WGMMA = """
#include "moe_wgmma.cuh"
using namespace quads;
template <typename Shape>
int run(const GemmArgs& p, int swiglu, int early) {
  return swiglu ? launch_wgmma<Shape, kSwiGlu, float>(p, early, nullptr)
                : launch_wgmma<Shape, kPlain, float>(p, early, nullptr);
}
extern "C" void late(int milliseconds) { emulation::late = milliseconds; }
extern "C" int gemm(const GemmArgs* p, int kind, int swiglu, int early) {
  if (kind == 1) return run<WgmmaShape<4, 1, 2, 64>>(*p, swiglu, early);
  if (kind == 2) return run<WgmmaShape<2, 2, 2, 64>>(*p, swiglu, early);
  if (kind == 4) return run<WgmmaShape<1, 4, 2, 64>>(*p, swiglu, early);
  return kind == 0 ? run<WgmmaShape<3, 1, 2, 96>>(*p, swiglu, early) : run<WgmmaShape<2, 1, 2, 160>>(*p, swiglu, early);
}
"""
DECODE = """
#include "moe_decode.h"
extern "C" int gemm(const GemmArgs* p, int kind, int swiglu, int early) {
  return swiglu ? launch_decode_shape<kSwiGlu, float>(*p, kind, early, nullptr)
                : launch_decode_shape<kPlain, float>(*p, kind, early, nullptr);
}
"""
SHARED = {
    "moe_wgmma.cuh": ("extern __shared__ char raw_smem[];", "char* const raw_smem = emulation::shared;"),
    "moe_decode.cu": ("extern __shared__ __align__(128) char smem[];", "char* const smem = emulation::shared;"),
}
WHOLE_WARP = "if (lane == 0) mbar_arrive(full + 8 * kMaxStages);"
"""A warp's loads come before its lane's arrival because it runs in step, which the host's threads do not."""


@pytest.fixture(scope="module")
def gemms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Host libraries, "wgmma" (batch, wide, prefill) and "decode", each with gemm(args, kind, swiglu, early)."""
    compiler, include = shutil.which("g++"), _cuda_include()
    if compiler is None or include is None:
        pytest.skip("needs g++ and the CUDA headers")
    directory: Path = tmp_path_factory.mktemp("gemms")
    emulation = Path(__file__).parent / "cuda_emulation"
    for name in ("moe_params.cuh", "weights.cuh", "moe_wgmma.cuh", "moe_decode.cu"):
        text = (source_directory() / name).read_text()
        if name in SHARED:
            assert text.count(SHARED[name][0]) == 1
            text = text.replace(*SHARED[name])
        if name == "moe_decode.cu":
            assert text.count(WHOLE_WARP) == 1
            text = text.replace(WHOLE_WARP, "__syncwarp(); " + WHOLE_WARP)
            # no extern "C": those make every dtype
            text = text[: text.index("}  // namespace\n}  // namespace quads")] + "}\n}\nusing namespace quads;\n"
        (directory / name.replace(".cu", ".h") if name.endswith(".cu") else directory / name).write_text(text)
    shutil.copy(emulation / "common.cuh", directory / "emulation.cuh")
    for name in ("common.cuh", "mma.cuh", "wgmma.cuh"):
        shutil.copy(emulation / "gemm" / name, directory)
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", f"-I{include}"]
    processes = []
    for name, text in (("wgmma", WGMMA), ("decode", DECODE)):
        (directory / f"{name}.cpp").write_text(text)
        command = [compiler, *flags, str(directory / f"{name}.cpp"), "-o", str(directory / f"{name}.so")]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return {name: ctypes.CDLL(str(directory / f"{name}.so")) for name in ("wgmma", "decode")}


def check(
    gemm: ctypes.CDLL, kind: int, capacity: int, n: int, k: int, counts: list[int], *, swiglu: bool = False,
    splits: int = 1, dense: bool = False, early: bool = True,
) -> None:  # fmt: skip
    """One launch against FP64. counts: tokens of each segment, of two experts in turn; dense: one matrix, with a scale
    per channel."""
    torch.manual_seed(n + k)
    experts = 1 if dense else 2
    weights = [PackedTensor.quantize(torch.randn(n, k) * 0.05) for _ in range(experts)]
    codes = torch.stack([w.codes for w in weights])
    scales = torch.stack([w.block_scales.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
    prepared = torch.empty(experts, *arranged_shape(n, k), dtype=torch.uint8)
    arrange_into(codes, scales, prepared, gate_up=swiglu)
    alpha = torch.ones(experts, 2) if dense else torch.rand(experts, 2) * 0.01 + 0.005
    if not swiglu:
        alpha[:, 1] = alpha[:, 0]
    pairs, channels = sum(counts), n // 2 if swiglu else n
    order = torch.arange(pairs) if dense else torch.randperm(pairs)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    segments = [(i % experts, start, count) for i, (start, count) in enumerate(zip(starts, counts, strict=True))]
    x = torch.zeros(pairs, padded_k(k), dtype=torch.float16)
    x[:, :k] = torch.randn(pairs, k)
    token, router, channel = torch.rand(pairs) + 0.5, torch.rand(pairs) + 0.5, torch.rand(n) + 0.5
    bias = torch.randn(experts, n) * 0.1
    y = torch.full((pairs * splits, channels), torch.nan)
    table, number = torch.tensor(segments, dtype=torch.int32), torch.tensor([len(segments)], dtype=torch.int32)
    ids = order.to(torch.int32)
    grouped = {} if dense else {
        "segments": table.data_ptr(), "num_segments": number.data_ptr(), "sorted": ids.data_ptr(),
    }  # fmt: skip
    args = GemmArgs(
        weights=prepared.data_ptr(), operand=x.data_ptr(), decode=token.data_ptr(), alpha=alpha.data_ptr(),
        bias=bias.data_ptr() if swiglu or dense else None, router=None if swiglu else router.data_ptr(),
        channel=channel.data_ptr() if dense else None, out=y.data_ptr(), kblocks=padded_k(k) // 64,
        row_tiles=padded_rows(n) // 64, ldb=padded_k(k), row_divisor=1, channels=channels, ldo=channels, bias_stride=n,
        max_tokens=capacity, rows=pairs, splits=splits, **grouped,
    )  # fmt: skip
    assert gemm.gemm(ctypes.byref(args), kind, int(swiglu), int(early)) == 0
    want = torch.empty(pairs, channels, dtype=torch.float64)
    for expert, start, count in segments:
        rows = order[start : start + count]
        z = x[rows, :k].double() @ weights[expert].scaled().double().T * token[rows, None].double()
        if swiglu:
            gate, up = (z.unflatten(1, (2, channels)) * alpha[expert, :, None] + bias[expert].view(2, -1)).unbind(1)
            want[rows] = torch.nn.functional.silu(gate) * up
        else:
            z = z * alpha[expert, 0] * (channel if dense else 1.0)
            want[rows] = (z + bias[expert] if dense else z) * router[rows, None]
    got = y.view(pairs, splits, channels).double().sum(1)
    assert float((got - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize(
    ("kind", "capacity"), [(1, 64), (2, 48), (4, 32), (0, 96), (3, 160)], ids=["1", "2", "4", "wide", "prefill"]
)
def test_wgmma_kernels(gemms: dict[str, ctypes.CDLL], kind: int, capacity: int) -> None:
    """Batch (1, 2 and 4 K groups), wide and prefill: full and nearly empty segments, ragged rows, SwiGLU, K splits, one
    matrix with channel scales, and many units of few stages in one thread block."""
    gemm = gemms["wgmma"]
    check(gemm, kind, capacity, 640, 256, [capacity, 3], swiglu=True)
    check(gemm, kind, capacity, 208, 256, [25], dense=True)
    check(gemm, kind, capacity, 96, 256, [5] * 17, early=False)
    if kind != 4:
        check(gemm, kind, capacity, 256, 512, [11, 7], splits=2)


def test_a_row_group_may_be_a_unit_ahead(gemms: dict[str, ctypes.CDLL]) -> None:
    """Rows whose warpgroups have gone on to a segment of fewer tokens write over no sums that others still read."""
    gemms["wgmma"].late(400)
    try:
        check(gemms["wgmma"], 2, 48, 640, 256, [48, 3], swiglu=True)
    finally:
        gemms["wgmma"].late(0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_decode_kernel(gemms: dict[str, ctypes.CDLL], groups: int) -> None:
    """The same of the kernel that keeps an expert's tokens in shared memory."""
    gemm = gemms["decode"]
    check(gemm, groups, 24, 640, 256, [24, 3], swiglu=True)
    check(gemm, groups, 16, 208, 256, [13], dense=True)
    check(gemm, groups, 8, 96, 256, [5] * 9, early=False)
