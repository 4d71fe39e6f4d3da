# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources of quantization and statistics, run on the CPU: every launch shape gives the reference's bits.

`tests/cuda_emulation` stands in for the CUDA runtime, so that indexing, masks, groups, padding and bookkeeping are
checked where there is no GPU. Memory models and the device's own instructions are not: see the tests marked `gpu`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rac_data import activations as heavy_rows
from test_kernels_quantize import FOUR, activations, reference_packed
from torch import Tensor

from vllm_quads.compensation import SiteStatistics, quantize_with_residual
from vllm_quads.compensation.forms import merged
from vllm_quads.compensation.linear import quantization_error
from vllm_quads.kernels._native import AlignArgs, KernelError, QuantizeArgs, SumArgs, find_nvcc, source_directory
from vllm_quads.kernels.layout import by_chunk
from vllm_quads.kernels.statistics import SiteArgs, StatisticsArgs
from vllm_quads.nvfp4 import BlockScaleRule, unswizzle
from vllm_quads.nvfp4.swizzle import padded_shape

_DTYPES = {torch.bfloat16: 0, torch.float16: 1}
KINDS = pytest.mark.parametrize(
    ("dtype", "rule"), [(torch.bfloat16, BlockScaleRule.FOUR_OVER_SIX), (torch.float16, BlockScaleRule.MAX_TO_SIX)]
)


def _cuda_include() -> Path | None:
    homes = [Path("/usr/local/cuda")]
    with contextlib.suppress(KernelError):
        homes.insert(0, Path(find_nvcc()).resolve().parents[1])
    return next((h / "include" for h in homes if (h / "include" / "cuda_fp16.h").is_file()), None)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The sources as host libraries: "few" and "many" are the quantizer with its kernels of few and of many rows."""
    compiler, include = shutil.which("g++"), _cuda_include()
    if compiler is None or include is None:
        pytest.skip("needs g++ and the CUDA headers")
    directory: Path = tmp_path_factory.mktemp("emulated")
    shutil.copy(Path(__file__).parent / "cuda_emulation" / "common.cuh", directory)
    for header in ("nvfp4_math.cuh", "sum.cuh"):
        shutil.copy(source_directory() / header, directory)
    shared = ("extern __shared__ float4 staged[];", "float4* const staged = emulation::dynamic_shared.data();")
    threshold = "kManyBlocks = 262144"
    jobs, commands = {"few": ("quantize", []), "many": ("quantize", [(threshold, "kManyBlocks = 1")]),
                      "statistics": ("statistics", [])}, []  # fmt: skip
    for name, (source, changes) in jobs.items():
        text = (source_directory() / f"{source}.cu").read_text()
        for old, new in ([shared] if source == "quantize" else []) + changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (directory / f"{name}.cpp").write_text(text)
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", f"-I{include}"]
        commands.append([compiler, *flags, str(directory / f"{name}.cpp"), "-o", str(directory / f"{name}.so")])
    for process in [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return {name: ctypes.CDLL(str(directory / f"{name}.so")) for name in jobs}


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def args_of(x: Tensor, pad: int = 0, **rest: Any) -> tuple[QuantizeArgs, Tensor, Tensor]:
    """Arguments, merged output [M, K + pad] and decode scales [M], both poisoned."""
    m, k = x.shape
    values, decode = torch.full((m, k + pad), 7.0, dtype=torch.float16), torch.full((m,), 7.0)
    fields = {key: address(v) if isinstance(v, Tensor) or v is None else v for key, v in rest.items()}
    args = QuantizeArgs(
        x=x.data_ptr(), merged=values.data_ptr(), decode=decode.data_ptr(), rows=m, k=k, ldx=x.stride(0), ldm=k + pad,
        full_divisor=1, **fields,
    )  # fmt: skip
    return args, values, decode


def launch(
    lib: ctypes.CDLL, args: QuantizeArgs, dtype: torch.dtype, rule: BlockScaleRule, packed: bool = False
) -> None:
    assert lib.quads_quantize(ctypes.byref(args), _DTYPES[dtype], int(FOUR[rule]), int(packed), None) == 0


@KINDS
@pytest.mark.parametrize(
    ("m", "k"), [(3, 16), (5, 48), (9, 192), (3, 512), (17, 768), (3, 2048), (2, 4096), (1, 7168), (1, 16384)]
)
@pytest.mark.parametrize("rows", ["few", "many"])
def test_merged_form(
    native: dict[str, ctypes.CDLL], rows: str, m: int, k: int, dtype: torch.dtype, rule: BlockScaleRule
) -> None:
    """Every launch shape: operands and decode scales equal the reference with masks per group, full rows, centring,
    static scales, selections that are read early; padding is zero."""
    x = activations(m, k, dtype, m + k)
    gen = torch.Generator().manual_seed(1)
    mask, center = torch.rand(3, k // 16, generator=gen) < 0.4, torch.randn(k, generator=gen) * 0.1
    group = torch.randint(0, 3, (m,), generator=gen, dtype=torch.int32)
    full = torch.rand(m, generator=gen) < 0.3
    pad = 64 if k % 128 else 0
    for use_center, g in ((False, None), (True, torch.tensor([3.0, 700.0, 51.7]))):
        used = center if use_center else None
        at = {"center": used, "g": g, "group": group, "early": int(use_center)}
        c = quantize_with_residual(x, rule=rule, center=used, g=None if g is None else g[group.long()][:, None])
        for extra, blocks in (
            ({"mask": mask, "full": full}, mask[group.long()] | full[:, None]),
            ({"full_all": 1}, None),
        ):
            if use_center and "full_all" in extra:
                extra |= {"center": by_chunk(center), "by_chunk": 1}
            args, values, decode = args_of(x, pad, **(at | extra))
            launch(native[rows], args, dtype, rule)
            assert torch.equal(decode, c.main.decode_scale.expand(m, 1)[:, 0])
            torch.testing.assert_close(values[:, :k], merged(c, blocks), rtol=0, atol=0, equal_nan=True)
            assert not values[:, k:].any()


@KINDS
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("m", "k"), [(5, 48), (3, 2048)])
def test_packed_form(
    native: dict[str, ctypes.CDLL], m: int, k: int, swizzled: bool, dtype: torch.dtype, rule: BlockScaleRule
) -> None:
    """Codes and scales with appended residual blocks, linear and swizzled, equal the reference byte for byte."""
    x, center = activations(m, k, dtype, m), torch.linspace(-0.2, 0.2, k)
    blocks = torch.arange(1, k // 16, 3, dtype=torch.int32)
    columns = k // 16 + blocks.numel()
    codes = torch.full((m, columns * 8), 77, dtype=torch.uint8)
    scales = torch.zeros(padded_shape(m, columns) if swizzled else (m, columns), dtype=torch.uint8)
    args, _, decode = args_of(
        x,
        center=center,
        codes=codes,
        scales=scales,
        appended=blocks,
        num_appended=blocks.numel(),
        swizzled=int(swizzled),
    )
    launch(native["few"], args, dtype, rule, packed=True)
    c = quantize_with_residual(x, rule=rule, center=center)
    want_codes, want_scales = reference_packed(c, blocks)
    if swizzled:
        scales = unswizzle(scales.view(torch.float8_e4m3fn), m, columns).view(torch.uint8)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scales, want_scales)
    assert torch.equal(decode, c.main.decode_scale[:, 0])


@pytest.mark.parametrize("rows", ["few", "many"])
def test_rows_without_a_group_are_left_alone(native: dict[str, ctypes.CDLL], rows: str) -> None:
    """Rows of a negative group are not written."""
    x = activations(11, 768, torch.bfloat16)
    group = torch.arange(11, dtype=torch.int32) % 2 - 1
    args, values, decode = args_of(x, group=group, full_all=1)
    launch(native[rows], args, torch.bfloat16, BlockScaleRule.MAX_TO_SIX)
    assert torch.equal(values[1::2], merged(quantize_with_residual(x))[1::2])
    assert bool((values[::2] == 7).all() and (decode[::2] == 7).all())


@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize(("tokens", "capacity"), [(40, 24), (700, 24), (700, 40)])
def test_grouping_beside_quantization(native: dict[str, ctypes.CDLL], rows: str, tokens: int, capacity: int) -> None:
    """The layer's first launch: pairs sorted by local expert in segments of bounded length, large segments first where
    they are large, and x quantized."""
    experts, top_k = 5, 4
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 9, (tokens, top_k), generator=gen, dtype=torch.int32)
    expert_map = torch.tensor([2, -1, 0, 1, -1, 3, 4, -1], dtype=torch.int32)
    pairs = ids.numel()
    blocks = -(-pairs // native[rows].quads_pairs_per_block())
    pair_expert, order, rank = (torch.full((pairs,), -7, dtype=torch.int32) for _ in range(3))
    segments, count = (
        torch.full((experts + pairs // capacity, 3), -7, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    histogram = torch.zeros(blocks * experts, dtype=torch.int32)
    align = AlignArgs(
        ids=ids.data_ptr(), expert_map=expert_map.data_ptr(), pair_expert=pair_expert.data_ptr(),
        sorted=order.data_ptr(), segments=segments.data_ptr(), num_segments=count.data_ptr(),
        rank=rank.data_ptr(), histogram=histogram.data_ptr(),
        pairs=pairs, id_stride=1, global_experts=8, local_experts=experts, capacity=capacity, blocks=blocks,
    )  # fmt: skip
    x = heavy_rows(tokens, 32).to(torch.bfloat16)
    args, values, _ = args_of(x, full_all=1)
    assert native[rows].quads_prologue(ctypes.byref(align), ctypes.byref(args), 0, 0, None) == 0
    assert torch.equal(values, merged(quantize_with_residual(x)))
    flat = ids.flatten().long()
    local = torch.where((flat >= 0) & (flat < 8), expert_map[flat.clamp(0, 7)], -1)
    assert torch.equal(pair_expert, local.int())
    seen = []
    for expert, start, length in segments[: int(count[0])].tolist():
        assert 0 < length <= capacity
        part = order[start : start + length].long()
        assert bool((local[part] == expert).all())
        seen += part.tolist()
    assert int(count[1]) == len(seen)
    lengths = segments[: int(count[0]), 2].tolist()
    # an expert's parts differ by one
    assert capacity < 40 or all(a + 1 >= b for a, b in itertools.pairwise(lengths))
    assert sorted(seen) == (local >= 0).nonzero().flatten().tolist()


def site(x: Tensor, statistics: SiteStatistics, **rest: Any) -> SiteArgs:
    fields = {key: address(v) if isinstance(v, Tensor) or v is None else v for key, v in rest.items()}
    return SiteArgs(
        x=x.data_ptr(), energy=statistics.energy.data_ptr(), tokens=statistics.tokens.data_ptr(), rows=x.shape[0],
        k=x.shape[1], ldx=x.stride(0), **{"divisor": 1, **fields},
    )  # fmt: skip


def reference(statistics: SiteStatistics, x: Tensor, rule: BlockScaleRule, center: Tensor | None = None,
              group: Tensor | None = None) -> None:  # fmt: skip
    c = quantize_with_residual(x, rule=rule, center=center)
    statistics.update(x, quantization_error(x, c, center), None if group is None else group.long())


@KINDS
def test_statistics(native: dict[str, ctypes.CDLL], dtype: torch.dtype, rule: BlockScaleRule) -> None:
    """Two sites in one launch: energies, tokens and ring of the reference, without padding rows, bad rows, pairs of
    nobody, and with nothing gathered while paused."""
    experts, top_k, tokens, k, inter = 4, 3, 40, 96, 48
    want, got = ([SiteStatistics(k, ring_rows=40), SiteStatistics(inter, experts)] for _ in range(2))
    center, valid = torch.linspace(-1, 1, k), torch.tensor([37], dtype=torch.int32)
    for step in range(3):
        x, h = heavy_rows(tokens, k, step).to(dtype), heavy_rows(tokens * top_k, inter, step + 9).to(dtype)
        x[step, 5], x[7, 0] = torch.nan, torch.inf
        group = torch.randint(-1, experts, (tokens * top_k,), generator=torch.Generator().manual_seed(step))
        order = group.argsort(stable=True)[int((group < 0).sum()) :]
        group, order = group.int(), order.int()
        counts = torch.tensor([2, order.numel()], dtype=torch.int32)
        decode = quantize_with_residual(x, rule=rule, center=center).main.decode_scale.flatten().contiguous()
        args = StatisticsArgs(paused=got[0].paused.data_ptr(), valid=valid.data_ptr(), size=decode.data_ptr(),
                              ring=got[0].ring.data_ptr(), written=got[0].written.data_ptr(),
                              ticket=got[0].ticket.data_ptr(), ring_rows=40)  # fmt: skip
        args.site[0] = site(x, got[0], center=center)
        args.site[1] = site(h, got[1], group=group, order=order, num_segments=counts, divisor=top_k)
        for paused in (1, 0):
            got[0].paused.fill_(paused)
            how = (_DTYPES[dtype], int(FOUR[rule]), None, None)
            if step == 2:  # with the sum that ends a layer, which is not paused
                y, out = torch.randn(tokens * top_k, k).to(dtype), torch.zeros(tokens, k, dtype=dtype)
                y[group < 0] = torch.nan
                ending = SumArgs(y=y.data_ptr(), pair_expert=group.data_ptr(), out=out.data_ptr(), ldo=k,
                                 tokens=tokens, top_k=top_k, columns=k, ldy=k)  # fmt: skip
                code = native["statistics"].quads_sum_statistics(ctypes.byref(ending), ctypes.byref(args), 0, *how)
                pairs = y.masked_fill((group < 0)[:, None], 0).float().unflatten(0, (tokens, top_k))
                assert torch.equal(out, (pairs[:, 0] + pairs[:, 1] + pairs[:, 2]).to(dtype))
            else:
                code = native["statistics"].quads_statistics(ctypes.byref(args), *how)
            assert code == 0
        reference(want[0], x[:37], rule, center)
        counted = (group >= 0) & (torch.arange(tokens * top_k) < 37 * top_k)
        reference(want[1], h[counted], rule, group=group[counted])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.energy, b.energy, rtol=2e-5, atol=0)
    assert torch.equal(got[0].ring, want[0].ring)
    assert torch.equal(got[0].written, want[0].written)
    assert not got[0].ticket.any()
