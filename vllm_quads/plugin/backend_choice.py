# SPDX-License-Identifier: Apache-2.0
"""Which backend runs on a device, chosen once, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_quads.plugin.backends import ExpertsBackend, LinearBackend, TorchExperts, TorchLinear


class BackendChoice(NamedTuple):
    """Which implementation runs, and why."""

    name: str
    reason: str


def choose_backend(device: torch.device) -> BackendChoice:
    """The backend of MoE layers and dense linears on this device."""
    if device.type == "cpu":
        return BackendChoice("torch", "CPU: torch reference, weights decoded once to float32 and cached")
    if device.type != "cuda":
        return BackendChoice("torch", f"{device.type}: torch reference, exact but slow")
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return BackendChoice("torch", f"compute capability {capability}: torch reference, exact but slow")
    from vllm_quads.kernels import KernelError, build

    try:
        build()
    except KernelError as e:
        return BackendChoice("torch", f"torch reference, exact but slow, because {e}")
    return BackendChoice("hopper", "compute capability 9.0: fused kernels on packed weights")


def make_experts_backend(device: torch.device) -> ExpertsBackend:
    """The MoE backend that `choose_backend` names."""
    if choose_backend(device).name == "hopper":
        from vllm_quads.plugin.hopper import HopperExperts

        return HopperExperts()
    return TorchExperts()


def make_linear_backend(device: torch.device) -> LinearBackend:
    """The backend of dense linears that `choose_backend` names."""
    if choose_backend(device).name == "hopper":
        from vllm_quads.plugin.hopper import HopperLinear

        return HopperLinear()
    return TorchLinear()
