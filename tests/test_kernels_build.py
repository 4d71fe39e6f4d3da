# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile, and where the kernels cannot run the reason is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vllm_quads.kernels import KernelError, _native, build


def _nvcc() -> str | None:
    try:
        return _native.find_nvcc()
    except KernelError:
        return None


@pytest.mark.slow
@pytest.mark.skipif(_nvcc() is None, reason="needs nvcc")
def test_sources_compile_for_hopper_and_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """csrc/ compiles for sm_90a into one library, which a second call takes from the cache."""
    monkeypatch.setenv("QUADS_CACHE_DIR", str(tmp_path))
    library = build()
    assert library.parent == tmp_path
    assert library.stat().st_size > 100_000
    monkeypatch.setattr(_native, "find_nvcc", lambda: pytest.fail("compiled again"))
    assert build() == library
    assert [p for p in tmp_path.iterdir() if p != library] == []  # nothing else is left behind


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
