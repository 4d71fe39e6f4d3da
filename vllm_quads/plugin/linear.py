# SPDX-License-Identifier: Apache-2.0
"""Linear methods: NVFP4 for the dense linears that the contract selects, plain ones for the rest on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_quads.nvfp4 import BLOCK_SIZE, CheckpointError, ContractError, scale_group
from vllm_quads.plugin import compat
from vllm_quads.plugin.host import LayerHost
from vllm_quads.plugin.ops import register_ops
from vllm_quads.plugin.parameters import Matrix, Role, add_parameters
from vllm_quads.plugin.runtime import LinearRuntime, SiteSpec

_QKV = {"q": 0, "k": 1, "v": 2}


class QuadsLinearMethod(LinearMethodBase):
    """An NVFP4 dense linear; q, k, v and gate, up are parts of one matrix.

    Parameters (N, K of this rank, P parts): `weight` uint8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_scale_2`
    float32 [P] (decode), `input_scale` float32 [P].
    """

    def __init__(self, config: LayerHost, prefix: str, parts: list[str]) -> None:
        register_ops()
        self.config = config
        self.key = f"quads.{prefix}"
        self.parts = parts
        """Canonical names of the parts, in storage order."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        k = input_size_per_partition
        if k % BLOCK_SIZE:
            raise ContractError(
                f"{self.parts[0]}: tensor parallelism cuts K = {input_size} into {k} channels a rank, which splits a "
                f"{BLOCK_SIZE}-channel block; use a smaller tensor_parallel_size or add it to `ignore`"
            )
        if len(output_partition_sizes) != len(self.parts):
            raise ContractError(
                f"{self.parts[0]}: vLLM stores {len(output_partition_sizes)} matrices as one here, QUADS knows "
                f"{len(self.parts)}: {self.parts}; add them to `ignore`"
            )
        if len({scale_group(part) for part in self.parts}) > 1:
            raise ContractError(
                f"{self.parts[0]}: vLLM multiplies with {self.parts} as one matrix, to which a trainer gives separate "
                f"global scales; add them to `ignore`"
            )
        full = full_rows(layer, output_partition_sizes)
        add_parameters(layer, "", (sum(output_partition_sizes),), k, (len(self.parts),), self._load)
        k_start = compat.tp_rank(layer) * k if k != input_size else 0
        self._matrices: list[Matrix] = []
        row = 0
        for i, (name, rows) in enumerate(zip(self.parts, output_partition_sizes, strict=True)):
            self._matrices.append(
                Matrix(
                    name,
                    n=full[i],
                    k=input_size,
                    local_n=(_first_row(layer, i, rows, full[i]), rows),
                    local_k=(k_start, k),
                    prefix="",
                    rows=(slice(row, row + rows),),
                    scalar=(i,),
                    counted=_counted(layer, i, rows == full[i] and k == input_size),
                )
            )
            row += rows
        self._rows = row
        self._loader = self.config.make_loader(layer, [self._matrices])
        site = SiteSpec(scale_group(self.parts[0]), "site", k, 1, input_size, k_start, 1, (0,))
        layer.quads = LinearRuntime(self.config, layer, self._loader, site)
        self.config.add_runtime(self.key, layer.quads)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.config.after_loading(layer.quads)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.vllm.quads_linear(x, self._rows, self.key)
        return y if bias is None else y + bias

    def _load(self, param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: str | int | None = None) -> None:
        """vLLM's weight loader: one whole tensor of one part, or of all parts stored as one."""
        role: Role = param.quads_role  # type: ignore[attr-defined]
        if loaded_shard_id is None and len(self._matrices) > 1:
            self._load_fused(param, role, loaded_weight)
            return
        index = _QKV.get(loaded_shard_id, loaded_shard_id) if isinstance(loaded_shard_id, str) else loaded_shard_id or 0
        if not isinstance(index, int):
            raise CheckpointError(f"{self.parts}: vLLM loads them as shard {loaded_shard_id!r}, which QUADS cannot")
        self._loader.load(self._matrices[index], role, loaded_weight, param)

    def _load_fused(self, param: nn.Parameter, role: Role, tensor: Tensor) -> None:
        if tensor.dim() < 2:
            for matrix in self._matrices:
                self._loader.load(matrix, role, tensor, param)
            return
        sizes = [m.n for m in self._matrices]
        if tensor.shape[0] != sum(sizes):
            raise CheckpointError(
                f"{self.parts}: stored as one tensor of shape {tuple(tensor.shape)}, expected {sum(sizes)} rows"
            )
        for matrix, part in zip(self._matrices, tensor.split(sizes), strict=True):
            self._loader.load(matrix, role, part, param)


class _StaysInPlace:
    """Weights in BF16 that stay as they were loaded.

    On a CPU vLLM repacks them and drops the originals, so that a weight could never be loaded again; without that,
    every way to refit works. Comes before vLLM's method in the order of base classes.
    """

    _config: LayerHost | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self._config is not None:
            self._config.model_loaded()
        if not compat.is_cpu():
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if compat.is_cpu():
            return linear(x, layer.weight, bias)
        out: Tensor = super().apply(layer, x, bias)  # type: ignore[misc]
        return out


class DenseLinearMethod(_StaysInPlace, UnquantizedLinearMethod):
    """A linear that stays in BF16."""

    def __init__(self, config: LayerHost | None = None) -> None:
        super().__init__()
        self._config = config


class DenseEmbeddingMethod(_StaysInPlace, UnquantizedEmbeddingMethod):
    """Embedding or lm_head in BF16."""

    def __init__(self, config: LayerHost) -> None:
        super().__init__()
        self._config: LayerHost = config

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # lm_head: what runs in Python in every step, also where CUDA graphs replay the layers.
        self._config.require_servable()
        return super().apply(layer, x, bias)


def full_rows(layer: Any, local: list[int]) -> list[int]:
    """Rows of each part of the whole matrix, before tensor parallelism; local: rows of each part of this rank."""
    if hasattr(layer, "total_num_kv_heads"):  # QKVParallelLinear: kv heads may be replicated
        kv = layer.total_num_kv_heads
        v_size = getattr(layer, "v_head_size", layer.head_size)
        return [layer.total_num_heads * layer.head_size, kv * layer.head_size, kv * v_size]
    if hasattr(layer, "output_sizes"):
        return list(layer.output_sizes)
    return [layer.output_size] if len(local) == 1 else list(local)


def _counted(layer: Any, part: int, whole: bool) -> bool:
    """True if this rank, of those that have the same shard of a part, is the one that counts."""
    if whole:
        return compat.is_first_replica()
    replicas = getattr(layer, "num_kv_head_replicas", 1) if part > 0 else 1
    return compat.tp_rank(layer) % replicas == 0 if replicas > 1 else True


def _first_row(layer: Any, part: int, rows: int, full: int) -> int:
    """First row of the local shard within the whole part."""
    if rows == full:
        return 0
    rank = compat.tp_rank(layer)
    if part > 0 and hasattr(layer, "num_kv_head_replicas"):
        rank //= layer.num_kv_head_replicas
    return rank * rows
