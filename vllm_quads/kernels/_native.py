# SPDX-License-Identifier: Apache-2.0
"""Builds `csrc/` with nvcc at first use and binds its C functions.

The shared object is cached per user, keyed by the sources' digest and the architecture
(`QUADS_CACHE_DIR`, default `$XDG_CACHE_HOME/vllm-quads`). It links neither torch nor Python: one build serves every
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from vllm_quads.nvfp4.errors import QuadsError

ARCHITECTURE = "90a"
"""The kernels use wgmma and setmaxnreg, which exist on compute capability 9.0 alone."""
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The kernels' numbers of dtypes, in CUDA and in Triton."""
ACTIVATIONS = (torch.bfloat16, torch.float16)
"""What activations may be."""


class KernelError(QuadsError, RuntimeError):
    """The kernels cannot be built, or a launch failed."""


class GemmArgs(ctypes.Structure):
    """Mirror of `GemmArgs` in csrc/moe_params.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "weights", "operand", "decode", "alpha", "bias", "router", "channel", "segments", "num_segments", "sorted",
            "out",
        )),
        *((name, ctypes.c_int) for name in (
            "kblocks", "row_tiles", "ldb", "row_divisor", "channels", "ldo", "bias_stride", "max_tokens", "rows",
            "splits",
        )),
    ]  # fmt: skip


class QuantizeArgs(ctypes.Structure):
    """Mirror of `QuantizeArgs` in csrc/quantize.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "x", "center", "g", "mask", "full", "group", "merged", "decode", "codes", "scales", "appended"
        )),
        *((name, ctypes.c_int) for name in (
            "rows", "k", "ldx", "ldm", "full_divisor", "full_all", "num_appended", "swizzled", "by_chunk", "early"
        )),
    ]  # fmt: skip


class AlignArgs(ctypes.Structure):
    """Mirror of `AlignArgs` in csrc/quantize.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "ids", "expert_map", "pair_expert", "sorted", "segments", "num_segments", "rank", "histogram"
        )),
        *((name, ctypes.c_int) for name in (
            "pairs", "id_stride", "global_experts", "local_experts", "capacity", "blocks"
        )),
    ]  # fmt: skip


class CastArgs(ctypes.Structure):
    """Mirror of `CastArgs` in csrc/cast.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "group", "operand", "decode")),
        *((name, ctypes.c_int) for name in ("rows", "k", "ldx", "ldm")),
    ]


class SumArgs(ctypes.Structure):
    """Mirror of `SumArgs` in csrc/sum.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "pair_expert", "out")),
        ("ldo", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "top_k", "columns", "ldy", "shift")),
    ]


class UnarrangeArgs(ctypes.Structure):
    """Mirror of `UnarrangeArgs` in csrc/unarrange.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "blocks")),
        *((name, ctypes.c_int) for name in ("experts", "rows", "k", "row_tiles", "kblocks", "gate_up")),
    ]


Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides."""


class InstallArgs(ctypes.Structure):
    """Mirror of `InstallArgs` in csrc/install.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "scales", "scalars", "blocks", "decode", "digests", "status")),
        ("source_stride", ctypes.c_int64 * 3),
        ("scale_stride", ctypes.c_int64 * 3),
        ("scalar_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_int) for name in (
            "experts", "rows", "k", "row_tiles", "kblocks", "gate_up", "row_offset", "k_offset", "count_global"
        )),
    ]  # fmt: skip


def source_directory() -> Path:
    """Where the CUDA sources are: beside the package (source checkout) or inside it (wheel)."""
    here = Path(__file__).resolve()
    for candidate in (here.parents[2] / "csrc", here.parents[1] / "csrc"):
        if (candidate / "moe_decode.cu").is_file():
            return candidate
    raise KernelError("the CUDA sources (csrc/*.cu) are not part of this installation; reinstall vllm-quads")


def find_nvcc() -> str:
    """Path of nvcc, from CUDACXX, CUDA_HOME, PATH or /usr/local/cuda; KernelError if there is none."""
    candidates = [os.environ.get("CUDACXX")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            candidates.append(str(Path(home) / "bin" / "nvcc"))
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise KernelError(
        "the Hopper kernels are compiled at first use and no nvcc was found; install the CUDA toolkit (12.4 or newer) "
        "and set CUDA_HOME, or copy the cache directory of a machine that has one (QUADS_CACHE_DIR)"
    )


def cache_directory() -> Path:
    """Directory of compiled kernels."""
    if explicit := os.environ.get("QUADS_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-quads"


def _digest(directory: Path) -> str:
    digest = hashlib.blake2b(ARCHITECTURE.encode(), digest_size=8)
    for path in sorted(directory.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(directory: Path | None = None) -> Path:
    """Compile the sources unless the cache has them; returns the shared object. Raises KernelError."""
    sources = directory or source_directory()
    target = cache_directory() / f"quads_{_digest(sources)}_sm{ARCHITECTURE}.so"
    if target.is_file():
        return target
    nvcc = find_nvcc()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        flags = ["-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC"]
        flags += ["-gencode", f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"]

        def compile_one(source: Path) -> Path:
            out = Path(scratch) / (source.stem + ".o")
            _run([nvcc, *flags, "-c", str(source), "-o", str(out)])
            return out

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, sorted(sources.glob("*.cu"))))
        linked = Path(scratch) / "quads.so"
        _run([nvcc, "-shared", "-o", str(linked), *map(str, objects)])
        os.replace(linked, target)  # atomic: ranks of one node may build at the same time
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"building the kernels failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises KernelError where they cannot run, saying why."""
    if not torch.cuda.is_available():
        raise KernelError("the Hopper kernels need an NVIDIA GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        raise KernelError(
            f"the Hopper kernels run on compute capability 9.0 alone, this GPU is {torch.cuda.get_device_capability()}"
        )
    lib = ctypes.CDLL(str(build()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    lib.quads_moe_decode.argtypes = [pointer, integer, integer, integer, integer, pointer]
    lib.quads_moe_batch.argtypes = [pointer, integer, integer, integer, integer, pointer]
    for name in ("quads_moe_wide", "quads_moe_prefill"):
        getattr(lib, name).argtypes = [pointer, integer, integer, integer, pointer]
    lib.quads_moe_decode_capacity.argtypes = [integer, integer]
    lib.quads_moe_batch_capacity.argtypes = [integer]
    lib.quads_quantize.argtypes = [pointer, integer, integer, integer, pointer]
    lib.quads_prologue.argtypes = [pointer, pointer, integer, integer, pointer]
    lib.quads_sum.argtypes = [pointer, integer, integer, pointer]
    lib.quads_unarrange.argtypes = [pointer, pointer]
    lib.quads_install.argtypes = [pointer, integer, pointer]
    lib.quads_cast.argtypes = [pointer, integer, pointer]
    lib.quads_error_string.argtypes = [integer]
    lib.quads_error_string.restype = ctypes.c_char_p
    return lib


def check(code: int, what: str) -> None:
    """Raise KernelError for a CUDA error code."""
    if code:
        raise KernelError(f"{what}: {library().quads_error_string(code).decode()}")


def stream() -> int:
    """The current CUDA stream's handle."""
    # What Triton asks, too: a stream object takes several microseconds to make.
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, where it is not: launches go there."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor, or None."""
    return None if tensor is None else tensor.data_ptr()


def unarrange(codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, k: int, gate_up: bool) -> None:
    """Launch csrc/unarrange.cu on checked tensors; see `layout.unarrange`."""
    rows = codes.shape[1]
    args = UnarrangeArgs(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        blocks=blocks.data_ptr(),
        experts=codes.shape[0],
        rows=rows,
        k=k,
        row_tiles=-(-rows // 128) * 2,
        kblocks=-(-k // 256) * 4,
        gate_up=int(gate_up),
    )
    with on_device(codes.device):
        check(library().quads_unarrange(ctypes.byref(args), stream()), "weight layout")


def install_form(
    source: Layout, scales: Layout | None, scalars: Layout | None, size: int, gate_up: bool
) -> InstallArgs:
    """Arguments of csrc/install.cu without addresses, for tensors [E, P, N, ...] of these shapes and strides.

    source has elements of `size` bytes: codes, or without scales BF16 weights.
    """
    (experts, parts, rows, columns), strides = source
    k = columns * (1 if scales is None else 2)
    return InstallArgs(
        source_stride=tuple(size * s for s in strides[:3]),
        scale_stride=(0, 0, 0) if scales is None else scales[1][:3],
        scalar_stride=(0, 0) if scalars is None else scalars[1],
        experts=experts,
        rows=rows,
        k=k,
        row_tiles=-(-rows * parts // 128) * 2,
        kblocks=-(-k // 256) * 4,
        gate_up=int(gate_up),
    )


def install(
    form: InstallArgs,
    source: torch.Tensor,
    scales: torch.Tensor | None,
    scalars: torch.Tensor | None,
    blocks: torch.Tensor,
    *,
    decode: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    row_offset: int = 0,
    k_offset: int = 0,
    count_global: bool = True,
) -> None:
    """Launch csrc/install.cu on checked tensors."""
    args = InstallArgs.from_buffer_copy(form)
    args.source, args.blocks = source.data_ptr(), blocks.data_ptr()
    args.scales, args.scalars = pointer(scales), pointer(scalars)
    args.decode, args.digests, args.status = pointer(decode), pointer(digests), pointer(status)
    args.row_offset, args.k_offset, args.count_global = row_offset, k_offset, count_global
    launch_install(args, scales is None, blocks.device)


def launch_install(args: InstallArgs, quantize: bool, device: torch.device) -> None:
    """Launch csrc/install.cu with arguments that are complete."""
    with on_device(device):
        check(library().quads_install(ctypes.byref(args), quantize, stream()), "installation of weights")
