# SPDX-License-Identifier: Apache-2.0
"""What `quads doctor` finds: versions, plugin, devices and backends, and the self-check."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

from vllm_quads.cli.selfcheck import Check, check_device

_PACKAGES = (
    "vllm-quads",
    "torch",
    "vllm",
    "vllm-cpu",
    "triton",
    "flashinfer-python",
    "transformers",
    "compressed-tensors",
    "safetensors",
)
_ENTRY_GROUP, _ENTRY_NAME = "vllm.general_plugins", "quads"
_VLLM_TIMEOUT = 120
_START_VLLM = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
print("QUADS " + json.dumps("quads" in QUANTIZATION_METHODS))
"""


@dataclass(frozen=True)
class Device:
    """A device, and the backend that runs on it."""

    name: str
    backend: str
    reason: str


@dataclass
class Diagnosis:
    """Everything that `quads doctor` reports."""

    environment: dict[str, str]
    devices: list[Device] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every check passed."""
        return all(c.ok for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return {"ok": self.ok, **asdict(self)}


def diagnose(*, start_vllm: bool = True) -> Diagnosis:
    """Look at this installation; never raises for what is missing, but reports it as a failed check."""
    found = Diagnosis(_environment())
    found.checks.append(_check_versions())
    found.checks.append(_check_entry_point())
    if start_vllm:
        found.checks.append(_check_registration())
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        found.devices.append(_device(device))
        found.checks += check_device(device)
    return found


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for name in _PACKAGES:
        found[name] = _version(name) or "not installed"
    found["CUDA of torch"] = str(torch.version.cuda or "none")
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_versions() -> Check:
    """vLLM and torch against the ranges of this package's own metadata."""
    from packaging.requirements import Requirement

    wanted: dict[str, Requirement] = {}
    for text in metadata.requires("vllm-quads") or []:
        requirement = Requirement(text)
        wanted[requirement.name] = requirement
    vllm = next((n for n in ("vllm-cpu", "vllm") if _version(n)), None)
    if vllm is None:
        advice = "pip install 'vllm-quads[cuda]' (NVIDIA GPU) or 'vllm-quads[cpu]'"
        return Check("versions", False, f"vLLM is not installed: {advice}")
    for name in ("torch", vllm):
        version, allowed = _version(name), wanted.get(name)
        if version and allowed and not allowed.specifier.contains(version.partition("+")[0], prereleases=True):
            return Check("versions", False, f"{name} {version} is outside of {allowed.specifier}; install one inside")
    detail = f"torch {_version('torch')} and {vllm} {_version(vllm)} are supported"
    if _version("vllm") is None:  # its command line asks for the version of a distribution of that very name
        detail += "; in-process only: `vllm serve` also needs `pip install --no-deps tools/vllm_cpu_alias`"
    return Check("versions", True, detail)


def _check_entry_point() -> Check:
    points = [p for p in metadata.entry_points(group=_ENTRY_GROUP) if p.name == _ENTRY_NAME]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not points:
        return Check("plugin entry point", False, f"{_ENTRY_GROUP} has no `quads`: install the package (pip install .)")
    if allowed is not None and _ENTRY_NAME not in allowed.split(","):
        return Check("plugin entry point", False, f"VLLM_PLUGINS={allowed} excludes it: add `quads` or unset it")
    return Check("plugin entry point", True, f"{_ENTRY_GROUP}: {points[0].value}")


def _check_registration() -> Check:
    """In a process of its own: vLLM logs to stdout, takes seconds, and may crash."""
    name = "vLLM finds quads"
    command = [sys.executable, "-c", _START_VLLM]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_VLLM_TIMEOUT, env=env, check=False)
    except subprocess.TimeoutExpired:
        return Check(name, False, f"vLLM did not start within {_VLLM_TIMEOUT} s")
    lines = [line for line in run.stdout.splitlines() if line.startswith("QUADS ")]
    if not lines:
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return Check(name, False, f"vLLM does not import here: {reason}")
    if not json.loads(lines[-1].removeprefix("QUADS ")):
        log = (run.stdout + run.stderr).strip().splitlines()
        return Check(name, False, f"the plugin did not register: {next((t for t in log if 'rror' in t), 'no message')}")
    return Check(name, True, "--quantization quads is available")


def _device(device: torch.device) -> Device:
    from vllm_quads.plugin.backend_choice import choose_backend

    name = platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    choice = choose_backend(device)
    return Device(f"{device} ({name})", choice.name, choice.reason)
