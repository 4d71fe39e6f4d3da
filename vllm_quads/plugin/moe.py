# SPDX-License-Identifier: Apache-2.0
"""The MoE method: packed experts, routed by vLLM, multiplied by a `backends.ExpertsBackend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from vllm_quads.nvfp4 import BLOCK_SIZE, ContractError, canonical_name
from vllm_quads.plugin import compat
from vllm_quads.plugin.host import LayerHost
from vllm_quads.plugin.ops import register_ops
from vllm_quads.plugin.parameters import Matrix, Role, add_parameters
from vllm_quads.plugin.runtime import ExpertsRuntime, SiteSpec


class QuadsMoEMethod(FusedMoEMethodBase):
    """NVFP4 experts with residual activation compensation.

    Parameters (E local experts, I intermediate size of this rank): `w13_weight` uint8 [E, 2I, H/2], `w13_weight_scale`
    E4M3 [E, 2I, H/16], `w13_weight_scale_2` float32 [E, 2] (decode; gate, up), `w13_input_scale` float32 [E, 2], and
    the same for w2 with [E, H, I/2], [E, H, I/16], [E], [E].
    """

    def __init__(self, config: LayerHost, prefix: str, layer: Any) -> None:
        super().__init__(layer.moe_config)
        _refuse_unsupported(layer, prefix)
        register_ops()
        self.config = config
        self.prefix = canonical_name(prefix)
        self.key = f"quads.{prefix}"
        self.num_experts: int = layer.global_num_experts
        self._matrices: dict[tuple[int, str], Matrix] = {}

    # -- vLLM's interface ----------------------------------------------------------------------------------------

    @property
    def is_monolithic(self) -> bool:
        """True where vLLM cannot route and this method does."""
        return compat.routes_inside()

    def maybe_make_prepare_finalize(self, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.26 and 0.27 would replace a method without a kernel: none of that."""
        return

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """No modular kernel, no config."""
        return

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        hidden, inter = hidden_size, intermediate_size_per_partition
        if extra.get("unpadded_hidden_size", hidden) != hidden:
            raise ContractError(
                f"{self.prefix}: vLLM pads the hidden size for this all-to-all backend, which QUADS cannot; use another"
            )
        if inter % BLOCK_SIZE:
            raise ContractError(
                f"{self.prefix}: tensor parallelism cuts the intermediate size into {inter} channels a rank, which "
                f"splits a {BLOCK_SIZE}-channel block; use a smaller tensor_parallel_size or enable_expert_parallel"
            )
        add_parameters(layer, "w13_", (num_experts, 2 * inter), hidden, (num_experts, 2), self._load)
        add_parameters(layer, "w2_", (num_experts, hidden), inter, (num_experts,), self._load)
        parallel = layer.moe_config.moe_parallel_config
        total, start = inter * parallel.tp_size, inter * parallel.tp_rank
        experts = _local_experts(layer, num_experts)
        groups: list[list[Matrix]] = []
        for e, expert in enumerate(experts):
            name = f"{self.prefix}.{expert}"
            gate, up = (
                Matrix(
                    f"{name}.{part}",
                    n=total,
                    k=hidden,
                    local_n=(start, inter),
                    local_k=(0, hidden),
                    prefix="w13_",
                    rows=(e, slice(i * inter, (i + 1) * inter)),
                    scalar=(e, i),
                )
                for i, part in enumerate(("gate_proj", "up_proj"))
            )
            down = Matrix(
                f"{name}.down_proj",
                n=hidden,
                k=total,
                local_n=(0, hidden),
                local_k=(start, inter),
                prefix="w2_",
                rows=(e,),
                scalar=(e,),
            )
            groups += [[gate, up], [down]]
            self._matrices |= {(expert, "w1"): gate, (expert, "w3"): up, (expert, "w2"): down}
        loader = self.config.make_loader(layer, groups)
        w13 = SiteSpec(f"{self.prefix}.w13", "w13", hidden, 1, hidden, 0, 1, (0,))
        w2 = SiteSpec(f"{self.prefix}.w2", "w2", inter, num_experts, total, start, self.num_experts, experts)
        layer.quads = ExpertsRuntime(self.config, layer, loader, w13, w2)
        self.config.add_runtime(self.key, layer.quads)
        self._loader = loader

    def process_weights_after_loading(self, layer: Any) -> None:
        self.config.after_loading(layer.quads)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = torch.ops.vllm.quads_experts(x, topk_weights, topk_ids, self.key)
        return out

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self.apply(layer, x, *compat.route(layer, router_logits))

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str | None = None,
        shard_id: str = "",
        expert_id: int = 0,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's weight loader: one whole tensor of one expert. False (nothing to do) for experts of other ranks."""
        matrix = self._matrices.get((expert_id, shard_id))
        if matrix is not None:
            role: Role = param.quads_role  # type: ignore[attr-defined]
            self._loader.load(matrix, role, loaded_weight, param)
        return matrix is not None if return_success else None


def _local_experts(layer: Any, num_local: int) -> tuple[int, ...]:
    """Global ids of this rank's experts, in local order."""
    if layer.expert_map is None:
        return tuple(range(num_local))
    local_of = layer.expert_map.tolist()
    by_local = {local: expert for expert, local in enumerate(local_of) if local >= 0}
    return tuple(by_local[i] for i in range(num_local))


def _refuse_unsupported(layer: Any, prefix: str) -> None:
    """Raise ContractError for what the MoE method would compute wrongly."""
    moe = layer.moe_config
    activation = getattr(layer.activation, "value", layer.activation)
    if activation != "silu":
        raise ContractError(
            f"{prefix}: has activation {activation!r}; QUADS computes silu(gate) * up only. Add the layer to `ignore`"
        )
    problems = (
        (
            layer.apply_router_weight_on_input and moe.experts_per_token != 1,
            "applies router weights to the input of several experts a token",
        ),
        (getattr(moe, "has_bias", False), "has experts with biases"),
        (getattr(layer, "swiglu_limit", None) is not None, "clamps its activations (swiglu_limit)"),
        (getattr(moe, "is_lora_enabled", False), "is served with LoRA adapters"),
        (moe.moe_parallel_config.enable_eplb, "is load-balanced across ranks (EPLB)"),
        (getattr(layer, "is_fused_checkpoint_transposed", False), "stores its experts transposed"),
    )
    for wrong, what in problems:
        if wrong:
            raise ContractError(
                f"{prefix}: {what}, which QUADS does not support; turn it off or add the layer to `ignore`"
            )
    reason = compat.check_routing(layer)
    if reason is not None:
        raise ContractError(f"{prefix}: {reason}")
