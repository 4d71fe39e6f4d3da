# SPDX-License-Identifier: Apache-2.0
"""The seam between the plugin and whatever multiplies: one backend object per layer, chosen once per device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_quads.compensation import (
    PreparedExperts,
    PreparedMatrix,
    SiteState,
    SiteStatistics,
    experts_forward,
    linear_forward,
    prepare_experts,
    prepare_matrix,
)
from vllm_quads.nvfp4 import Contract, PackedTensor


class BackendChoice(NamedTuple):
    """Which implementation runs, and why."""

    name: str
    reason: str


def choose_backend(device: torch.device) -> BackendChoice:
    """The backend of MoE layers on this device. Dense linears run the torch reference everywhere."""
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


class ExpertsBackend(Protocol):
    """Multiplies with the experts of one layer."""

    splits_auto: bool
    """True if Form.AUTO tells decode from prefill tokens here, so that `forward` wants to know which are which."""

    def prepare(
        self,
        w13: tuple[Tensor, Tensor, Tensor],
        w2: tuple[Tensor, Tensor, Tensor],
        w13_site: SiteState,
        w2_site: SiteState,
    ) -> None:
        """Take over packed weights (codes, block scales, decode scales) and compensation state after a change."""

    def forward(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        contract: Contract,
        *,
        expert_map: Tensor | None,
        w13_site: SiteState,
        w2_site: SiteState,
        g13: Tensor | None,
        g2: Tensor | None,
        decode: Tensor | None,
        w13_statistics: SiteStatistics | None,
        w2_statistics: SiteStatistics | None,
    ) -> Tensor:
        """See `compensation.experts_forward`, but topk_ids [M, k] are global expert ids (negative: nobody's), and
        expert_map (integer [global experts]: local expert or -1, None: all are local) says which ones are here."""


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Local expert ids of global ones; negative where the expert lives elsewhere."""
    if expert_map is None:
        return topk_ids
    local = expert_map[topk_ids.clamp(min=0).to(torch.int64)].to(torch.int64)
    return torch.where(topk_ids < 0, -1, local)


class TorchExperts:
    """Reference backend: `compensation.experts_forward` on float32 copies of the weights."""

    splits_auto = True

    def __init__(self) -> None:
        self._prepared: PreparedExperts | None = None

    def prepare(
        self,
        w13: tuple[Tensor, Tensor, Tensor],
        w2: tuple[Tensor, Tensor, Tensor],
        w13_site: SiteState,
        w2_site: SiteState,
    ) -> None:
        self._prepared = None  # free the old copy first
        self._prepared = prepare_experts(w13, w2, w13_site, w2_site)

    def forward(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        contract: Contract,
        *,
        expert_map: Tensor | None,
        w13_site: SiteState,
        w2_site: SiteState,
        g13: Tensor | None,
        g2: Tensor | None,
        decode: Tensor | None,
        w13_statistics: SiteStatistics | None,
        w2_statistics: SiteStatistics | None,
    ) -> Tensor:
        assert self._prepared is not None
        return experts_forward(
            x,
            self._prepared,
            topk_weights,
            local_ids(topk_ids, expert_map),
            contract,
            w13_site=w13_site,
            g13=g13,
            g2=g2,
            decode=decode,
            w13_statistics=w13_statistics,
            w2_statistics=w2_statistics,
        )


class TorchLinear:
    """Reference backend of a dense linear: `compensation.linear_forward` on a float32 copy of the weight."""

    def __init__(self) -> None:
        self._prepared: PreparedMatrix | None = None

    def prepare(self, parts: list[PackedTensor], site: SiteState) -> None:
        """Take over the packed parts [N_i, K] (q, k, v; gate, up) and the compensation state after a change."""
        self._prepared = None
        scaled = torch.cat([p.scaled() for p in parts])
        decode = torch.cat([p.decode_scale.expand(p.shape[0]) for p in parts])
        self._prepared = prepare_matrix(scaled, decode, site.blocks[0], site.center)

    def forward(
        self,
        x: Tensor,
        contract: Contract,
        *,
        site: SiteState,
        g: Tensor | None,
        decode: Tensor | None,
        statistics: SiteStatistics | None,
    ) -> Tensor:
        """See `compensation.linear_forward`."""
        assert self._prepared is not None
        return linear_forward(x, self._prepared, contract, site=site, g=g, decode=decode, statistics=statistics)


def make_experts_backend(device: torch.device) -> ExpertsBackend:
    """The MoE backend that `choose_backend` names."""
    if choose_backend(device).name == "hopper":
        from vllm_quads.plugin.hopper import HopperExperts

        return HopperExperts()
    return TorchExperts()
