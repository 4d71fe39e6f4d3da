# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile, their launchers take every plan, and where the kernels cannot run the reason is said."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_quads.kernels import KernelError, _native, build
from vllm_quads.kernels._native import GemmArgs
from vllm_quads.kernels.layout import K_BLOCK, ROW_TILE, padded_k, padded_rows
from vllm_quads.kernels.plan import (
    DeviceLimits,
    Gemm,
    GemmChoice,
    LayerShape,
    LinearShape,
    plan_layer,
    plan_linear,
)

REFUSED = 1
"""cudaErrorInvalidValue: what a launcher returns for arguments that its kernel is not for."""
# local experts, global experts, top-k, hidden, intermediate
SHAPES = (
    (128, 128, 8, 2048, 768),
    (128, 128, 8, 2048, 96),
    (32, 256, 8, 7168, 2048),
    (8, 8, 2, 4096, 14336),
    (16, 16, 1, 5120, 8192),
    (512, 512, 10, 2048, 512),
    (4, 4, 3, 512, 96),
    (2, 2, 1, 16384, 53248),
    (1, 8, 2, 16, 16),
)
TOKENS = (1, 2, 5, 8, 9, 16, 31, 32, 33, 48, 64, 65, 100, 128, 200, 256, 600, 1024, 1500, 4096, 16384, 65536)


def _nvcc() -> str | None:
    try:
        return _native.find_nvcc()
    except KernelError:
        return None


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory into which the sources have been compiled."""
    if _nvcc() is None:
        pytest.skip("needs nvcc")
    directory: Path = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUADS_CACHE_DIR", str(directory))
        build()
    return directory


@pytest.mark.slow
def test_sources_compile_for_hopper_and_are_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """csrc/ compiles for sm_90a into one library, which a second call takes from the cache."""
    monkeypatch.setenv("QUADS_CACHE_DIR", str(cache))
    monkeypatch.setattr(_native, "find_nvcc", lambda: pytest.fail("compiled again"))
    library = build()
    assert library.stat().st_size > 100_000
    assert list(cache.iterdir()) == [library]  # nothing else is left behind


def launcher_of(library: ctypes.CDLL, choice: GemmChoice, args: GemmArgs, epilogue: int, out_dtype: int) -> int:
    """What the launcher of a plan's kernel returns; see `launch.launch_gemm`, which needs a GPU."""
    if choice.gemm in (Gemm.WIDE, Gemm.PREFILL):
        function = library.quads_moe_wide if choice.gemm is Gemm.WIDE else library.quads_moe_prefill
        return int(function(ctypes.byref(args), epilogue, out_dtype, 0, None))
    function = library.quads_moe_decode if choice.gemm is Gemm.DECODE else library.quads_moe_batch
    return int(function(ctypes.byref(args), epilogue, out_dtype, choice.k_groups, 0, None))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is not refused would be launched, on no data")
def test_no_plan_is_refused_by_its_launcher(cache: Path) -> None:
    """For any shape, number of tokens and GPU size the planned kernels fit: without a GPU a launcher first checks its
    arguments, and then reports that there is no device."""
    library = ctypes.CDLL(str(next(cache.iterdir())))

    def accepts(choice: GemmChoice, n: int, k: int, capacity: int, splits: int, epilogue: int, dtype: int) -> bool:
        args = GemmArgs(
            kblocks=padded_k(k) // K_BLOCK, row_tiles=padded_rows(n) // ROW_TILE, max_tokens=capacity, splits=splits
        )
        code = launcher_of(library, choice, args, epilogue, dtype)
        assert code != 0
        return code != REFUSED

    decode = functools.cache(lambda k, groups: int(library.quads_moe_decode_capacity(k // K_BLOCK, groups)))
    batch = functools.cache(lambda groups: int(library.quads_moe_batch_capacity(groups)))
    assert not accepts(GemmChoice(Gemm.DECODE), 128, 2048, 40, 1, 1, 0)  # what is refused is seen
    assert not accepts(GemmChoice(Gemm.BATCH, 4), 128, 256, 8, 2, 1, 2)
    for multiprocessors in (132, 114):
        limits = DeviceLimits(multiprocessors, decode, batch)
        for local, experts, top_k, hidden, inter in SHAPES:
            for tokens in TOKENS:
                plan = plan_layer(LayerShape(tokens, top_k, local, experts, hidden, inter), limits)
                assert accepts(plan.first, 2 * inter, hidden, plan.capacity, 1, 0, 0), (tokens, plan)
                assert accepts(plan.second, hidden, inter, plan.capacity, plan.splits, 1, 2), (tokens, plan)
                for n, k in ((2 * inter, hidden), (hidden, inter)):
                    linear = plan_linear(LinearShape(tokens, n, k), limits)
                    assert accepts(linear.kernel, n, k, linear.capacity, linear.splits, 1, 2), (tokens, n, k, linear)


def test_a_change_of_the_sources_is_built_anew(tmp_path: Path) -> None:
    """The cache key covers every source file's name and bytes."""
    (tmp_path / "a.cu").write_text("int a;")
    before = _native._digest(tmp_path)
    (tmp_path / "b.cuh").write_text("int b;")
    assert _native._digest(tmp_path) != before


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvcc the error says what to install and which variable to set."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if os.path.exists("/usr/local/cuda/bin/nvcc"):
        pytest.skip("a toolkit is installed in the default place")
    with pytest.raises(KernelError, match="CUDA_HOME"):
        _native.find_nvcc()


def test_a_failing_compilation_shows_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler error is passed on with the command that failed."""
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(compiler))
    monkeypatch.setenv("QUADS_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(KernelError, match="no such thing"):
        build()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message without a GPU")
def test_without_a_gpu_the_kernels_say_so() -> None:
    """Loading the kernels without a GPU raises KernelError, not an OSError from a driver."""
    _native.library.cache_clear()
    with pytest.raises(KernelError, match="NVIDIA GPU"):
        _native.library()
