# SPDX-License-Identifier: Apache-2.0
"""Float weights of a layer, gathered as they arrive and quantized as stacks: a few kernels for many matrices.

Extra memory is a share of one layer's BF16 bytes: the batch, and what waits for the matrices that it shares its global
scale with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_quads.kernels.weights import quantize_stack, weight_amax
from vllm_quads.nvfp4 import CheckpointError
from vllm_quads.plugin.parameters import Matrix
from vllm_quads.plugin.storage import PackedStorage, on

_GPU_BYTES, _GPU_SHARE = 256 * 1024**2, 4
"""A batch is at most this large, and at most a layer's BF16 bytes divided by this."""
_CPU_BYTES, _CPU_SHARE = 1024**2, 16
"""The reference needs a dozen times its input while it runs."""

Group = list[tuple[Matrix, Tensor]]
"""Matrices that share a global scale, with their whole BF16 weights."""


class FloatBatch:
    """Groups that are complete and wait to be quantized together."""

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes
        self._groups: dict[str, Group] = {}
        self._bytes = 0

    def add(self, group: Group) -> None:
        """Add a group; one that waits already is replaced."""
        key = group[0][0].name
        if key not in self._groups:
            self._bytes += sum(weight.nbytes for _, weight in group)
        self._groups[key] = group

    def __bool__(self) -> bool:
        return bool(self._groups)

    def matrices(self) -> list[Matrix]:
        """All that wait."""
        return [m for group in self._groups.values() for m, _ in group]

    def __contains__(self, key: str) -> bool:
        return key in self._groups

    @property
    def is_full(self) -> bool:
        """True if no more should be gathered."""
        if not self._groups:
            return False
        on_gpu = next(iter(self._groups.values()))[0][1].is_cuda
        most, share = (_GPU_BYTES, _GPU_SHARE) if on_gpu else (_CPU_BYTES, _CPU_SHARE)
        return self._bytes >= min(most, self._layer_bytes // share)

    def take(self) -> list[Group]:
        """All groups; the batch is empty then."""
        groups, self._groups, self._bytes = list(self._groups.values()), {}, 0
        return groups


def quantize_groups(
    groups: list[Group],
    storage: PackedStorage,
    shared_amax: Callable[[list[str], Tensor], Tensor],
    name_of: Callable[[Matrix], str],
) -> None:
    """Quantize the groups into a layer's parameters. They are emptied on the way.

    shared_amax: gives the amax float32 [G] that the groups, named by their first matrices, are quantized with, from
    their own. Raises CheckpointError naming a weight that holds NaN or Inf; then nothing of its prefix is written.
    """
    by_prefix: dict[str, list[Group]] = {}
    for group in groups:
        by_prefix.setdefault(group[0][0].prefix, []).append(group)
    for some in by_prefix.values():
        keys = [group[0][0].name for group in some]
        stacks = _stacks(some)
        amax = shared_amax(keys, _amax(stacks, len(keys), name_of))
        while stacks:
            stack = stacks.pop()
            first = stack.matrices[0]
            shard = stack.weight.narrow(1, *first.local_n).narrow(2, *first.local_k)
            storage.write_stack(stack.matrices, quantize_stack(shard, amax[stack.group]))
            del stack, shard


class _Stack:
    """Matrices of one shape."""

    def __init__(self, entries: list[tuple[int, Matrix, Tensor]]) -> None:
        weights = [weight for _, _, weight in entries]
        self.matrices = [matrix for _, matrix, _ in entries]
        self.weight = torch.stack(weights) if len(weights) > 1 else weights[0][None]
        """bfloat16 [S, N, K]."""
        self.group = on(self.weight.device, [group for group, _, _ in entries])
        """int64 [S]: which group each belongs to."""


def _stacks(groups: list[Group]) -> list[_Stack]:
    """The matrices of the groups by shape of their whole and of their shards; empties the groups."""
    by_shape: dict[tuple[object, ...], list[tuple[int, Matrix, Tensor]]] = {}
    for number, group in enumerate(groups):
        for m, weight in group:
            by_shape.setdefault((m.n, m.k, m.local_n, m.local_k), []).append((number, m, weight))
        group.clear()
    return [_Stack(by_shape.pop(shape)) for shape in list(by_shape)]


def _amax(stacks: list[_Stack], groups: int, name_of: Callable[[Matrix], str]) -> Tensor:
    """Largest magnitude in each group, float32 [groups]; waits for the device once."""
    own = [weight_amax(stack.weight) for stack in stacks]
    together = torch.cat(own)
    if not bool(torch.isfinite(together).all()):
        matrices = [m for stack in stacks for m in stack.matrices]
        bad = next(m for m, good in zip(matrices, torch.isfinite(together).tolist(), strict=True) if not good)
        raise CheckpointError(
            f"{name_of(bad)}: holds NaN or Inf, which NVFP4 cannot represent; the model has diverged or the file is "
            f"damaged"
        )
    index = torch.cat([stack.group for stack in stacks])
    return torch.zeros(groups, dtype=torch.float32, device=together.device).scatter_reduce_(0, index, together, "amax")
