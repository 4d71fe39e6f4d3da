# SPDX-License-Identifier: Apache-2.0
"""What has arrived of a layer and is written or checked for many matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_quads.nvfp4 import CheckpointError, FormatError, PackedTensor
from vllm_quads.nvfp4.formats import E4M3_NAN_BYTE
from vllm_quads.plugin.parameters import Matrix, Role
from vllm_quads.plugin.quantizing import FloatBatch, quantize_groups
from vllm_quads.plugin.storage import PackedStorage

Scalar = tuple[Matrix, Role, Tensor]


class Waiting:
    """Float weights to quantize, scales to write, and packed weights to check, of one layer."""

    def __init__(self, matrices: Sequence[Matrix], layer_bytes: int) -> None:
        self._all = matrices
        self.floats = FloatBatch(layer_bytes)
        self.scalars: dict[tuple[str, str], Scalar] = {}
        """(matrix, "global" or "input") -> the scale as it came."""
        self.packed: dict[str, Matrix] = {}
        """Matrices whose codes and block scales have been written."""

    def __bool__(self) -> bool:
        return bool(self.floats or self.scalars or self.packed)

    def matrices(self) -> list[Matrix]:
        """All that something waits of."""
        return [*self.floats.matrices(), *self.packed.values(), *(m for m, _, _ in self.scalars.values())]

    def whole(self) -> list[Matrix]:
        """Those that are complete once they have been written."""
        return [*self.floats.matrices(), *self.packed.values()]

    def forget_partial(self) -> None:
        """Drop global scales of matrices whose codes or block scales have not come."""
        self.scalars = {key: s for key, s in self.scalars.items() if key[1] == "input" or key[0] in self.packed}

    def write(
        self,
        storage: PackedStorage,
        shared_amax: Callable[[list[str], Tensor], Tensor],
        where: Callable[[Matrix, Role], str],
        input_scales: dict[str, Tensor],
    ) -> None:
        """Write and check everything; static activation scales (decode direction) are entered in `input_scales` too.

        shared_amax: see `quantize_groups`. Raises CheckpointError naming the first tensor that is damaged.
        """
        for (role, _, _), scalars in self._scalars().items():
            matrices = [m for m, _, _ in scalars]
            values = torch.stack([value for _, _, value in scalars])
            _check_scalars(values, scalars, where)
            if role in (Role.ENCODE_SCALE, Role.INPUT_ENCODE_SCALE):
                values = 1.0 / values
            is_input = role in (Role.INPUT_SCALE, Role.INPUT_ENCODE_SCALE)
            storage.write_scalars(matrices, Role.INPUT_SCALE if is_input else Role.DECODE_SCALE, values)
            if is_input:
                input_scales.update(zip((m.name for m in matrices), values.unbind(), strict=True))
        for prefix in dict.fromkeys(m.prefix for m in self.packed.values()):
            self._check_packed(storage, prefix, where)
        quantize_groups(self.floats.take(), storage, shared_amax, lambda m: where(m, Role.WEIGHT))

    def _scalars(self) -> dict[tuple[Role, str, torch.device], list[Scalar]]:
        """Those that can be written together."""
        out: dict[tuple[Role, str, torch.device], list[Scalar]] = {}
        for matrix, role, value in self.scalars.values():
            out.setdefault((role, matrix.prefix, value.device), []).append((matrix, role, value))
        return out

    def _check_packed(self, storage: PackedStorage, prefix: str, where: Callable[[Matrix, Role], str]) -> None:
        """Raise CheckpointError if the block scales of a matrix are damaged (their global scales have been checked)."""
        matrices = [m for m in self.packed.values() if m.prefix == prefix]
        if len(matrices) == sum(m.prefix == prefix for m in self._all):
            raw = storage.tensor(prefix, Role.BLOCK_SCALE).view(torch.uint8)
            if not bool((raw >= E4M3_NAN_BYTE).any()):  # NaN, or negative
                return
        for m in matrices:
            try:
                PackedTensor(*storage.shard(m), where(m, Role.WEIGHT)).check_values()
            except FormatError as e:
                raise CheckpointError(str(e)) from e


def _check_scalars(values: Tensor, scalars: list[Scalar], where: Callable[[Matrix, Role], str]) -> None:
    good = torch.isfinite(values) & (values > 0)
    if bool(good.all()):
        return
    bad = good.tolist().index(False)
    matrix, role, value = scalars[bad]
    raise CheckpointError(
        f"{where(matrix, role)}: is {float(value)}, expected a finite, positive scale; the checkpoint is damaged"
    )
