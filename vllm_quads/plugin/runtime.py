# SPDX-License-Identifier: Apache-2.0
"""What a quantized layer keeps beside its parameters: compensation state, statistics, and derived operands.

It is a child module of the layer, so that vLLM's layerwise reload (which takes a layer's own tensors apart) puts its
buffers back untouched, and sleep mode saves them. Buffers are not parameters: nothing loads or reshuffles them, and
they change only at a refit or by an explicit call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm_quads.compensation import SiteInputs, SiteState, SiteStatistics, uses_blocks
from vllm_quads.compensation.statistics import RING_ROWS
from vllm_quads.nvfp4 import BLOCK_SIZE, ActivationGlobalScale, Centering, CheckpointError, Contract, Form, PackedTensor
from vllm_quads.nvfp4.formats import E4M3_MAX
from vllm_quads.nvfp4.reference import FOUR_OVER_SIX_E4M3_MAX, BlockScaleRule
from vllm_quads.plugin import compat
from vllm_quads.plugin.backend_choice import make_experts_backend, make_linear_backend
from vllm_quads.plugin.backends import ExpertsRequest, LinearRequest, WeightHolder
from vllm_quads.plugin.host import LayerHost
from vllm_quads.plugin.loading import PackedLoader


@dataclass(frozen=True)
class SiteSpec:
    """A site of this layer: one GEMM operand."""

    name: str
    """Site name, as in `compensation.state`."""
    key: str
    """Prefix of its buffers."""
    k: int
    """Channels of the local shard."""
    groups: int
    """Local experts for w2, else 1."""
    full_k: int
    k_start: int
    """Channels of the whole input, and where the local shard begins."""
    full_groups: int
    group_index: tuple[int, ...]
    """Groups of the whole model, and which of them are local, in local order."""


class LayerRuntime(nn.Module):
    """State and derived operands of one quantized layer."""

    _layer: weakref.ref[nn.Module]

    def __init__(self, config: LayerHost, layer: Any, loader: PackedLoader, sites: list[SiteSpec]) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", weakref.ref(layer))  # not a child: the layer owns this module
        self.config = config
        self.loader = loader
        self.specs = {s.name: s for s in sites}
        self.states: dict[str, SiteState] = {}
        """Channel sets and centring vectors of each site (the buffers)."""
        self.active: dict[str, SiteState] = {}
        """What the contract lets take effect of them."""
        self.statistics: dict[str, SiteStatistics] = {}
        self.collecting = False
        self.in_graphs = False
        """True once forward passes always hold the accumulators, see `gather_in_graphs`."""
        self._derived_from: tuple[int, int] | None = None
        self._memory_lost = False
        self._state_version = 0
        self._has_center = dict.fromkeys(self.specs, False)
        loader.on_complete = self.settle_for_graphs
        for s in sites:
            center = torch.zeros(s.k, dtype=torch.float32)  # vLLM builds models under another default dtype
            blocks = torch.zeros(s.groups, s.k // BLOCK_SIZE, dtype=torch.bool)
            for suffix, buffer in (("center", center), ("blocks", blocks)):
                buffer.weight_loader_numel = 0  # type: ignore[attr-defined]  # nothing to load, says vLLM's reload
                self.register_buffer(f"{s.key}_{suffix}", buffer, persistent=False)
        self.state_changed()

    @property
    def layer(self) -> Any:
        """The vLLM layer that owns this."""
        layer = self._layer()
        assert layer is not None
        return layer

    @property
    def contract(self) -> Contract:
        """The engine's contract; its activation and compensation sections may change at run time."""
        return self.config.contract

    # -- compensation state --------------------------------------------------------------------------------------

    def check_state(self, sites: Mapping[str, SiteState]) -> None:
        """Raise CheckpointError if the state of one of this layer's sites has another shape."""
        for name, spec in self.specs.items():
            state = sites.get(name)
            if state is None:
                continue
            if state.center.numel() != spec.full_k or state.blocks.shape[0] != spec.full_groups:
                raise CheckpointError(
                    f"compensation state of {name}: has {state.center.numel()} channels and {state.blocks.shape[0]} "
                    f"groups, expected {spec.full_k} and {spec.full_groups}; calibrate again with this model"
                )

    def set_state(self, sites: Mapping[str, SiteState]) -> None:
        """Copy the state of this layer's sites, which `check_state` has let through, into the fixed buffers; sites that
        are not given are emptied."""
        for name, spec in self.specs.items():
            state = sites.get(name)
            self._has_center[name] = state is not None and bool(state.center.any())
            if state is None:
                getattr(self, f"{spec.key}_center").zero_()
                getattr(self, f"{spec.key}_blocks").zero_()
                continue
            groups = torch.tensor(spec.group_index, dtype=torch.int64)
            blocks = state.blocks.cpu()[groups]
            start = spec.k_start // BLOCK_SIZE
            getattr(self, f"{spec.key}_center").copy_(state.center[spec.k_start : spec.k_start + spec.k])
            getattr(self, f"{spec.key}_blocks").copy_(blocks[:, start : start + spec.k // BLOCK_SIZE])
        self.state_changed()

    def state_changed(self) -> None:
        """The buffers or the contract have changed: what is multiplied with has to follow."""
        contract = self.contract
        for name, spec in self.specs.items():
            center, blocks = getattr(self, f"{spec.key}_center"), getattr(self, f"{spec.key}_blocks")
            self.states[name] = SiteState(center, blocks)
            self.active[name] = SiteState(
                torch.zeros_like(center) if contract.activation.centering is Centering.NONE else center,
                blocks if uses_blocks(contract) else torch.zeros_like(blocks),
            )
        self._state_version += 1
        self.settle_for_graphs()

    def centered(self) -> bool:
        """False if no centring vector takes effect: every one is zero. Does not ask the device."""
        return self.contract.activation.centering is not Centering.NONE and any(self._has_center.values())

    # -- statistics ----------------------------------------------------------------------------------------------

    def collect(self, on: bool) -> None:
        """Start or stop gathering statistics; what was gathered is kept until `reset_statistics`."""
        if on:
            self._allocate_statistics()
        self.collecting = on
        for statistics in self.statistics.values():
            statistics.paused.fill_(not on)

    def gather_in_graphs(self) -> None:
        """Before CUDA graphs are captured: allocate the accumulators, and give them to every forward pass from now on.

        Kernels that a graph replays read on the device whether `collect` has switched gathering on. The accumulators
        become buffers, so that sleep mode saves them.
        """
        if self.in_graphs:
            return
        self._allocate_statistics()
        self.in_graphs = True
        self.collect(False)
        for name, statistics in self.statistics.items():
            for key, tensor in statistics.tensors().items():
                tensor.weight_loader_numel = 0  # type: ignore[attr-defined]
                self.register_buffer(f"{self.specs[name].key}_statistics_{key}", tensor, persistent=False)

    def _allocate_statistics(self) -> None:
        device = getattr(self, f"{next(iter(self.specs.values())).key}_center").device
        for name, spec in self.specs.items():
            if name not in self.statistics:
                ring = RING_ROWS if spec.groups == 1 and spec.full_groups == 1 else 0
                self.statistics[name] = SiteStatistics(spec.k, spec.groups, ring_rows=ring, device=device)

    def reset_statistics(self) -> None:
        """Forget what was gathered, in place."""
        for statistics in self.statistics.values():
            statistics.reset()

    def gathering(self, name: str) -> SiteStatistics | None:
        """The accumulator of a site if statistics are switched on, or might be while a graph replays."""
        return self.statistics.get(name) if self.collecting or self.in_graphs else None

    def _valid(self, x: Tensor) -> Tensor | None:
        """Rows of x that are tokens, which graphs have to read on the device."""
        return compat.token_count(x.device) if self.in_graphs else None

    # -- derived operands ----------------------------------------------------------------------------------------

    def _ready(self) -> None:
        """What a forward pass begins with. Raises RefitError if it must not take place."""
        self.config.require_servable()
        try:
            self.settle()
        except Exception:
            self.config.refused()
            raise

    def settle(self) -> None:
        """Rebuild the derived operands if parameters or state have changed. Every forward pass begins with this.

        Raises RefitError if a weight has arrived only in part.
        """
        version = (self.loader.version, self._state_version)
        if self._derived_from != version:
            self.loader.check_settled()
            # vLLM runs models in inference mode, and what was made in it can only be changed in it.
            with torch.inference_mode():
                if self._memory_lost:
                    self.loader.restore_input_scales()
                self._prepare()
            self._derived_from, self._memory_lost = version, False

    def memory_lost(self) -> None:
        """The device memory that was allocated while the model was loaded has been dropped (sleep level 2).

        A refit writes all weights anew. What it does not send is written anew when it settles.
        """
        self._memory_lost = True

    def settle_for_graphs(self) -> None:
        """After a change: rebuild at once where captured CUDA graphs replay without running Python."""
        if self.follows_in_graphs:
            self.settle()

    @property
    def follows_in_graphs(self) -> bool:
        """True once there are derived operands that captured CUDA graphs may read."""
        return self._derived_from is not None and next(iter(self._buffers.values())).is_cuda  # type: ignore[union-attr]

    def copies_to_settle(self) -> list[tuple[Tensor, Tensor]] | None:
        """Targets and sources of copies, if these are all that `settle_for_graphs` would do; else None.

        Whoever has made them calls `settled`.
        """
        return None

    def settled(self) -> None:
        """The derived operands are those of the parameters and of the state as they are."""
        self._derived_from = (self.loader.version, self._state_version)

    def _prepare(self) -> None:
        raise NotImplementedError

    def hand_over(self) -> None:
        """After loading: give the weights to a backend that keeps them, if it is of that kind."""

    def static_scale(self, input_scale: Tensor, *, shared: bool = False) -> Tensor | None:
        """Encode global scale from decode-direction input scales (amax/2688), or None for per-token scales.

        shared: one scale for all, since they see the same input: the largest amax that any was calibrated with.
        """
        if self.contract.activation.global_scale is ActivationGlobalScale.TOKEN:
            return None
        g = 1.0 / (input_scale.amax() if shared else input_scale)
        if self.contract.activation.block_scale_rule is BlockScaleRule.FOUR_OVER_SIX:
            g = g * (FOUR_OVER_SIX_E4M3_MAX / E4M3_MAX)  # the rule's range is 6 * 256 instead of 6 * 448
        return g


class ExpertsRuntime(LayerRuntime):
    """Runtime of a MoE layer: sites `<name>.w13` and `<name>.w2`."""

    def __init__(self, config: LayerHost, layer: Any, loader: PackedLoader, w13: SiteSpec, w2: SiteSpec) -> None:
        super().__init__(config, layer, loader, [w13, w2])
        self.w13, self.w2 = w13, w2
        self.backend = make_experts_backend(torch.get_default_device())
        self._holder = self.backend if isinstance(self.backend, WeightHolder) else None
        if self._holder is not None:
            loader.storage.kept_elsewhere = self._holder.packed

    def _stored(self, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, block scales and global scales as they are in the parameters: the first two are empty if the backend
        holds them."""
        layer = self.layer
        return (
            getattr(layer, f"{prefix}_weight").data,
            getattr(layer, f"{prefix}_weight_scale").data,
            getattr(layer, f"{prefix}_weight_scale_2").data,
        )

    def _packed(self, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, decode = self._stored(prefix)
        if not codes.numel():
            assert self._holder is not None
            codes, scales = self._holder.packed(f"{prefix}_")
        return codes, scales, decode

    def _prepare(self) -> None:
        w13, w2 = self.active[self.w13.name], self.active[self.w2.name]
        if self._memory_lost:
            self.backend.forget()
        self.backend.prepare(self._stored("w13"), self._stored("w2"), w13, w2, centered=self.centered())
        if self.loader.is_open and self._holder is not None:
            self.loader.storage.close()

    def copies_to_settle(self) -> list[tuple[Tensor, Tensor]] | None:
        if not self.follows_in_graphs or self._memory_lost or self.loader.is_open or self._holder is None:
            return None
        self.loader.check_settled()
        layer, centered = self.layer, self.centered()
        return self._holder.decode_copies(layer.w13_weight_scale_2.data, layer.w2_weight_scale_2.data, centered)

    def hand_over(self) -> None:
        """After loading: give the weights to a backend that keeps them, and free the parameters.

        Does nothing while a weight has arrived only in part.
        """
        if self._holder is not None and not self.loader.is_partial() and self.loader.is_open:
            self.settle()

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """MoE output [M, H] of x [M, H] with global expert ids [M, k] (negative: nobody's)."""
        layer, w13, w2 = self.layer, self.active[self.w13.name], self.active[self.w2.name]
        self._ready()
        split = self.backend.splits_auto and self.contract.compensation.form is Form.AUTO
        return self.backend.forward(
            ExpertsRequest(
                x,
                topk_weights,
                topk_ids,
                self.contract,
                w13,
                w2,
                expert_map=layer.expert_map,
                g13=self.static_scale(layer.w13_input_scale.data, shared=True),
                g2=self.static_scale(layer.w2_input_scale.data),
                decode=compat.decode_mask(x.shape[0], x.device) if split else None,
                w13_statistics=self.gathering(self.w13.name),
                w2_statistics=self.gathering(self.w2.name),
                valid=self._valid(x),
                router_on_input=layer.apply_router_weight_on_input,
            )
        )

    def site_inputs(self) -> dict[str, SiteInputs]:
        """What `compensation.refresh` needs, for sites that have seen tokens; decoded from the packed parameters."""
        shared, own = (self.statistics.get(s.name) for s in (self.w13, self.w2))
        if shared is None or own is None or not int(shared.tokens[0]):
            return {}
        share = own.tokens.to(torch.float64) / shared.tokens[0]
        codes, scales, decode = self._packed("w13")
        # Gate and up may have scales of their own: split into two "experts" rows of one stack.
        half = codes.shape[1] // 2
        gate_up = PackedTensor(
            torch.cat((codes[:, :half], codes[:, half:])),
            torch.cat((scales.view(torch.uint8)[:, :half], scales.view(torch.uint8)[:, half:])).view(scales.dtype),
            decode.T.flatten().contiguous(),
            self.w13.name,
        )
        return {
            self.w13.name: SiteInputs(
                shared, gate_up, share.repeat(2), False, self.static_scale(self.layer.w13_input_scale.data, shared=True)
            ),
            self.w2.name: SiteInputs(own, PackedTensor(*self._packed("w2"), self.w2.name), share, True),
        }


class LinearRuntime(LayerRuntime):
    """Runtime of a dense linear: one site, named after its scale group."""

    def __init__(self, config: LayerHost, layer: Any, loader: PackedLoader, site: SiteSpec) -> None:
        super().__init__(config, layer, loader, [site])
        self.site = site
        self.backend = make_linear_backend(torch.get_default_device())

    def _parts(self) -> list[PackedTensor]:
        return [self.loader.packed(m) for m in self.loader.matrices]

    def _prepare(self) -> None:
        if self._memory_lost:
            self.backend.forget()
        self.backend.prepare(self._parts(), self.active[self.site.name], centered=self.centered())

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] = x [..., K] times the local weight, without bias."""
        state = self.active[self.site.name]
        self._ready()
        flat = x.reshape(-1, x.shape[-1])
        split = self.backend.splits_auto and self.contract.compensation.form is Form.AUTO
        y = self.backend.forward(
            LinearRequest(
                flat,
                self.contract,
                state,
                g=self.static_scale(self.layer.input_scale.data, shared=True),
                decode=compat.decode_mask(flat.shape[0], x.device) if split else None,
                statistics=self.gathering(self.site.name),
                valid=self._valid(x),
            )
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def site_inputs(self) -> dict[str, SiteInputs]:
        """What `compensation.refresh` needs, if the site has seen tokens."""
        statistics = self.statistics.get(self.site.name)
        if statistics is None or not int(statistics.tokens[0]):
            return {}
        stack = _stack(self._parts(), self.site.name)
        share = torch.ones(stack.codes.shape[0], dtype=torch.float64, device=stack.codes.device)
        g = self.static_scale(self.layer.input_scale.data, shared=True)
        return {self.site.name: SiteInputs(statistics, stack, share, False, g)}


def settle_together(runtimes: Iterable[LayerRuntime]) -> None:
    """`settle_for_graphs` of many layers, with a few launches instead of a few a layer where that is possible."""
    waiting: list[LayerRuntime] = []
    copies: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for runtime in runtimes:
        own = runtime.copies_to_settle()
        if own is None:
            runtime.settle_for_graphs()
            continue
        waiting.append(runtime)
        for pair in own:
            copies.setdefault(pair[0].shape, []).append(pair)
    with torch.inference_mode():  # see `settle`
        for pairs in copies.values():
            sources = torch.stack([source for _, source in pairs])
            torch._foreach_copy_([target for target, _ in pairs], list(sources.unbind()))
    for runtime in waiting:
        runtime.settled()


def _stack(parts: list[PackedTensor], name: str) -> PackedTensor:
    """Parts of one dense matrix as [1, N, K], or padded with zero rows to [parts, max N, K] if their scales differ."""
    decode = torch.stack([p.decode_scale for p in parts])
    codes = [p.codes for p in parts]
    scales = [p.block_scales.view(torch.uint8) for p in parts]
    if bool((decode == decode[0]).all()):
        decode = decode[:1]
        codes, scales = [torch.cat(codes)], [torch.cat(scales)]
    else:
        rows = max(c.shape[0] for c in codes)
        codes = [nn.functional.pad(c, (0, 0, 0, rows - c.shape[0])) for c in codes]
        scales = [nn.functional.pad(s, (0, 0, 0, rows - s.shape[0])) for s in scales]
    return PackedTensor(torch.stack(codes), torch.stack(scales).view(torch.float8_e4m3fn), decode, name)
