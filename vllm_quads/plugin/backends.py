# SPDX-License-Identifier: Apache-2.0
"""The seam between the plugin and whatever multiplies, one backend object per layer, and the torch reference behind it.

Which one runs where: `backend_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

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
from vllm_quads.kernels.install import ShardPlace, Sinks
from vllm_quads.kernels.weights import QuantizedStack
from vllm_quads.nvfp4 import Contract, PackedTensor

Packed = tuple[Tensor, Tensor, Tensor]
"""Codes, block scales and decode scales of a stack of matrices."""


@dataclass(frozen=True)
class ExpertsRequest:
    """One forward pass of a MoE layer."""

    x: Tensor
    """[M, H], any float dtype."""
    topk_weights: Tensor
    """[M, k]: router weights."""
    topk_ids: Tensor
    """integer [M, k]: global expert ids, negative: nobody's."""
    contract: Contract
    w13_site: SiteState
    w2_site: SiteState
    """What the contract lets take effect of the compensation state."""
    expert_map: Tensor | None = None
    """integer [global experts]: local expert or -1; None: all are local."""
    g13: Tensor | None = None
    g2: Tensor | None = None
    """Static encode global scales, float32 scalar and [E]; None: one per token."""
    decode: Tensor | None = None
    """bool [M]: decode tokens, where the backend asks for it (`splits_auto`)."""
    w13_statistics: SiteStatistics | None = None
    w2_statistics: SiteStatistics | None = None
    """Accumulators, while statistics are gathered (or might be, when a captured graph replays)."""
    valid: Tensor | None = None
    """int32 [1] on the device: rows of x that are tokens, for statistics; None: all."""
    router_on_input: bool = False
    """Router weights multiply the input instead of the output (Llama 4; top-1 layers)."""

    @property
    def gathers(self) -> bool:
        """True while statistics are gathered."""
        return self.w13_statistics is not None or self.w2_statistics is not None


@dataclass(frozen=True)
class LinearRequest:
    """One forward pass of a dense linear."""

    x: Tensor
    """[M, K], any float dtype."""
    contract: Contract
    site: SiteState
    """What the contract lets take effect of the compensation state."""
    g: Tensor | None = None
    """Static encode global scale, float32 scalar; None: one per token."""
    decode: Tensor | None = None
    """bool [M]: decode tokens, where the backend asks for it (`splits_auto`)."""
    statistics: SiteStatistics | None = None
    """Accumulator, while statistics are gathered (or might be, when a captured graph replays)."""
    valid: Tensor | None = None
    """int32 [1] on the device: rows of x that are tokens, for statistics; None: all."""


@dataclass(frozen=True)
class Receipt:
    """What writing the matrices of one section leaves behind."""

    digests: Tensor
    """int64 [matrices]: the shards' digests are added."""
    status: Tensor
    """int32 [1]: bits of `kernels.install` that say what damage was found."""
    decode: Tensor
    """float32 of one element a matrix: decode scales."""

    @cached_property
    def sinks(self) -> Sinks:
        """The same for `kernels.install`."""
        return Sinks(self.decode, self.digests, self.status)


class ExpertsBackend(Protocol):
    """Multiplies with the experts of one layer."""

    splits_auto: bool
    """True if Form.AUTO tells decode from prefill tokens here, so that `forward` wants to know which are which."""

    def prepare(
        self, w13: Packed, w2: Packed, w13_site: SiteState, w2_site: SiteState, *, centered: bool = True
    ) -> None:
        """Take over packed weights and compensation state after a change; centered=False: all centres are zero.

        Codes and block scales that are empty stand for those that a WeightHolder has.
        """

    def forget(self) -> None:
        """The contents of all buffers are lost (their addresses are not): the next `prepare` has to write them all."""

    def forward(self, request: ExpertsRequest) -> Tensor:
        """y [M, H] in x's dtype, the local experts' share; see `compensation.experts_forward`."""


@runtime_checkable
class WeightHolder(Protocol):
    """A backend that keeps packed experts in an order of its own, so that the layer's packed parameters need not.

    Prefixes are those of the parameters, `w13_` and `w2_`.
    """

    def install(
        self, prefix: str, weights: QuantizedStack | Tensor, amax: Tensor | None, receipt: Receipt, place: ShardPlace
    ) -> None:
        """Replace the experts of a prefix in place, after a `prepare`: with packed ones, [E, P, N, ...] or [E, P * N,
        ...], or with float ones [E, P, N, K], quantized with amax [E, P]. Waits for nothing; the receipt gets what is
        found on the way."""

    def packed(self, prefix: str) -> tuple[Tensor, Tensor]:
        """New tensors with the codes and block scales that are kept, exactly as they came."""

    def stored(self, prefix: str) -> Tensor:
        """The tensor in which they are kept; its address does not change."""

    def decode_copies(self, w13: Tensor, w2: Tensor, centered: bool) -> list[tuple[Tensor, Tensor]] | None:
        """All that a `prepare` after `install` would do with decode scales [E, 2] and [E], if that is to copy: targets
        and sources of one shape. None if it is more."""


class LinearBackend(Protocol):
    """Multiplies with one dense matrix, stored in parts (q, k, v; gate, up)."""

    splits_auto: bool
    """See `ExpertsBackend`."""

    def prepare(self, parts: list[PackedTensor], site: SiteState, *, centered: bool = True) -> None:
        """Take over the packed parts [N_i, K] and the compensation state after a change; centered=False: the centre is
        zero."""

    def forget(self) -> None:
        """The contents of all buffers are lost (their addresses are not): the next `prepare` has to write them all."""

    def forward(self, request: LinearRequest) -> Tensor:
        """y [M, N] in x's dtype, without the layer's bias; see `compensation.linear_forward`."""


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
        self, w13: Packed, w2: Packed, w13_site: SiteState, w2_site: SiteState, *, centered: bool = True
    ) -> None:
        self._prepared = None  # free the old copy first
        self._prepared = prepare_experts(w13, w2, w13_site, w2_site)

    def forget(self) -> None:
        """`prepare` makes all buffers."""

    def forward(self, request: ExpertsRequest) -> Tensor:
        assert self._prepared is not None
        return reference_experts(request, self._prepared, request.decode)


def reference_experts(r: ExpertsRequest, prepared: PreparedExperts, decode: Tensor | None) -> Tensor:
    """A request by the reference, on prepared experts; decode: see `compensation.token_forms`."""
    x, weights = r.x, r.topk_weights
    if r.router_on_input:
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    return experts_forward(
        x,
        prepared,
        weights,
        local_ids(r.topk_ids, r.expert_map),
        r.contract,
        w13_site=r.w13_site,
        g13=r.g13,
        g2=r.g2,
        decode=decode,
        w13_statistics=r.w13_statistics,
        w2_statistics=r.w2_statistics,
    )


class TorchLinear:
    """Reference backend of a dense linear: `compensation.linear_forward` on a float32 copy of the weight."""

    splits_auto = True

    def __init__(self) -> None:
        self._prepared: PreparedMatrix | None = None

    def prepare(self, parts: list[PackedTensor], site: SiteState, *, centered: bool = True) -> None:
        self._prepared = None
        scaled = torch.cat([p.scaled() for p in parts])
        self._prepared = prepare_matrix(scaled, channel_scales(parts), site.blocks[0], site.center)

    def forget(self) -> None:
        """`prepare` makes all buffers."""

    def forward(self, request: LinearRequest) -> Tensor:
        assert self._prepared is not None
        r = request
        return linear_forward(
            r.x, self._prepared, r.contract, site=r.site, g=r.g, decode=r.decode, statistics=r.statistics
        )


def channel_scales(parts: list[PackedTensor]) -> Tensor:
    """float32 [N]: the decode scale of each output channel of parts [N_i, K] stored as one."""
    return torch.cat([p.decode_scale.expand(p.shape[0]) for p in parts])
