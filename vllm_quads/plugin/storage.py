# SPDX-License-Identifier: Apache-2.0
"""The packed parameters of one layer as memory: written by matrix or stack, emptied while a backend keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vllm_quads.kernels.weights import QuantizedStack
from vllm_quads.plugin.parameters import Matrix, Role


class PackedStorage:
    """Finds the shards of matrices in a layer's parameters. Writes never change a parameter's address."""

    def __init__(self, layer: nn.Module, matrices: Sequence[Matrix]) -> None:
        # Parameters hold their loader, and vLLM's reload metadata holds parameters: a strong reference would keep the
        # layer alive for ever.
        self._layer = weakref.ref(layer)
        self._prefixes = tuple(dict.fromkeys(m.prefix for m in matrices))
        self.kept_elsewhere: Callable[[str], tuple[Tensor, Tensor]] | None = None
        """Gives codes and block scales of a parameter prefix if they are kept outside of the parameters (`close`)."""

    @property
    def is_open(self) -> bool:
        """True if the parameters hold the packed weights; False if they are empty and the backend does."""
        return self._parameter(self._prefixes[0], Role.WEIGHT).numel() > 0

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._parameter(self._prefixes[0], Role.WEIGHT).device

    def close(self) -> None:
        """Empty the packed parameters: the backend has taken them over. They are filled again when something asks."""
        with torch.inference_mode(False):  # or nothing could be loaded into them outside of it
            for prefix in self._prefixes:
                for role in (Role.WEIGHT, Role.BLOCK_SCALE):
                    param = self._parameter(prefix, role)
                    param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    def _open(self) -> None:
        assert self.kept_elsewhere is not None
        with torch.inference_mode(False), torch.no_grad():
            for prefix in self._prefixes:
                codes, scales = self.kept_elsewhere(prefix)
                self._parameter(prefix, Role.WEIGHT).data = codes
                self._parameter(prefix, Role.BLOCK_SCALE).data = scales

    def tensor(self, prefix: str, role: Role) -> Tensor:
        """A parameter's contents; filled first if the backend has them."""
        param = self._parameter(prefix, role)
        if param.numel() == 0:
            self._open()
        return param.data

    def shard(self, matrix: Matrix) -> QuantizedStack:
        """The local shard of a matrix as it is in the parameters (views)."""
        return QuantizedStack(
            self.tensor(matrix.prefix, Role.WEIGHT)[matrix.rows],
            self.tensor(matrix.prefix, Role.BLOCK_SCALE)[matrix.rows],
            self.tensor(matrix.prefix, Role.DECODE_SCALE)[matrix.scalar],
        )

    def write(self, matrix: Matrix, role: Role, shard: Tensor) -> None:
        """Copy the codes or block scales of a matrix's shard."""
        # Bytes are copied as bytes: float8 has few kernels, and NaN codes must arrive as they are to be refused.
        self.tensor(matrix.prefix, role)[matrix.rows].view(torch.uint8).copy_(shard.view(torch.uint8))

    def write_stack(self, matrices: Sequence[Matrix], packed: QuantizedStack) -> None:
        """Copy the shards [S, N, ...] of S matrices with one prefix, and their decode scales."""
        prefix, rows = matrices[0].prefix, packed.codes.shape[1]
        for role, source in ((Role.WEIGHT, packed.codes), (Role.BLOCK_SCALE, packed.block_scales)):
            target = _words(self.tensor(prefix, role))
            firsts = [_first_row(m, target.shape[-2]) for m in matrices]
            index = on(target.device, firsts)[:, None] + torch.arange(rows, device=target.device)
            target.view(-1, target.shape[-1])[index.flatten()] = _words(source).flatten(0, 1)
        self.write_scalars(matrices, Role.DECODE_SCALE, packed.decode_scale)

    def write_scalars(self, matrices: Sequence[Matrix], role: Role, values: Tensor) -> None:
        """Write global or input scales float32 [S] of S matrices with one prefix."""
        scales = self.tensor(matrices[0].prefix, role)
        strides = scales.stride()
        index = [sum(i * stride for i, stride in zip(m.scalar, strides, strict=True)) for m in matrices]
        scales.view(-1)[on(scales.device, index)] = values.to(scales.device)

    def _parameter(self, prefix: str, role: Role) -> nn.Parameter:
        layer = self._layer()
        assert layer is not None
        param: nn.Parameter = getattr(layer, prefix + role.value)
        return param


def on(device: torch.device, values: Sequence[int]) -> Tensor:
    """int64 on a device, without waiting for what the device still has to do."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _words(t: Tensor) -> Tensor:
    """Bytes [..., N, C] in units of eight, if such units divide a row."""
    return t.view(torch.int64 if t.shape[-1] % 8 == 0 else torch.uint8)


def _first_row(matrix: Matrix, rows_per_expert: int) -> int:
    """The first row of a shard in parameters [..., N, C] seen as [rows, C]."""
    row = 0
    for i in matrix.rows:
        row += i.start if isinstance(i, slice) else i * rows_per_expert
    return row
