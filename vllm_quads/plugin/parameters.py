# SPDX-License-Identifier: Apache-2.0
"""The packed parameters of a quantized layer: which there are, and where each matrix of the model lies in them.

One set of canonical parameters serves every source: BF16 (quantized on arrival), ModelOpt names (decode scales) and
compressed-tensors names (encode scales).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from vllm_quads.nvfp4 import BLOCK_SIZE

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Role(str, Enum):
    """Which tensor of a packed weight a parameter stands for; the value is the name in checkpoints."""

    WEIGHT = "weight"
    """A float weight to quantize, or ModelOpt's packed codes."""
    WEIGHT_PACKED = "weight_packed"
    """compressed-tensors' packed codes."""
    BLOCK_SCALE = "weight_scale"
    DECODE_SCALE = "weight_scale_2"
    ENCODE_SCALE = "weight_global_scale"
    INPUT_SCALE = "input_scale"
    INPUT_ENCODE_SCALE = "input_global_scale"


CANONICAL = (Role.WEIGHT, Role.BLOCK_SCALE, Role.DECODE_SCALE, Role.INPUT_SCALE)
ALIASES = (Role.WEIGHT_PACKED, Role.ENCODE_SCALE, Role.INPUT_ENCODE_SCALE)
"""Names that other checkpoint formats use; their parameters are placeholders whose loaders write canonical ones."""

FIELD = {
    Role.WEIGHT: "codes",
    Role.WEIGHT_PACKED: "codes",
    Role.BLOCK_SCALE: "scales",
    Role.DECODE_SCALE: "global",
    Role.ENCODE_SCALE: "global",
    Role.INPUT_SCALE: "input",
    Role.INPUT_ENCODE_SCALE: "input",
}
PACKED_FIELDS = frozenset(("codes", "scales", "global"))


@dataclass(frozen=True)
class Matrix:
    """One quantized [N, K] matrix of the model and where its local shard lives in a layer's packed parameters."""

    name: str
    """Canonical name."""
    n: int
    k: int
    """Shape of the whole matrix."""
    local_n: tuple[int, int]
    """(first row, rows) of the local shard."""
    local_k: tuple[int, int]
    """(first channel, channels) of the local shard."""
    prefix: str
    """Parameter name prefix: `w13_`, `w2_`, or empty."""
    rows: tuple[int | slice, ...]
    """Index of the shard's rows in the codes and block scales."""
    scalar: tuple[int, ...]
    """Index of the matrix in the global and input scales."""
    counted: bool = True
    """False if another rank has the same shard, and counts it where digests are added up over ranks."""

    @property
    def is_whole(self) -> bool:
        """True if the local shard is the whole matrix."""
        return self.local_n[1] == self.n and self.local_k[1] == self.k


def add_parameters(
    layer: nn.Module,
    prefix: str,
    rows: tuple[int, ...],
    k: int,
    scalars: tuple[int, ...],
    loader: Callable[..., object],
) -> None:
    """Register the packed parameters of matrices [*rows, K] and the placeholders of other checkpoint formats.

    scalars: shape of the global scales. All are created at once, on the default device, in their final form.
    """
    shapes: dict[Role, tuple[tuple[int, ...], torch.dtype]] = {
        Role.WEIGHT: ((*rows, k // 2), torch.uint8),
        Role.BLOCK_SCALE: ((*rows, k // BLOCK_SIZE), torch.float8_e4m3fn),
        Role.DECODE_SCALE: (scalars, torch.float32),
        Role.INPUT_SCALE: (scalars, torch.float32),
    }
    # Placeholders lead with the expert dimension, as everything that expert parallelism looks at must.
    shapes |= dict.fromkeys(ALIASES, ((scalars[0], 1), torch.float32))
    for role, (shape, dtype) in shapes.items():
        raw = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
        param = nn.Parameter(raw.view(dtype), requires_grad=False)
        param.quads_role = role  # type: ignore[attr-defined]
        param.weight_loader = loader  # type: ignore[attr-defined]
        if role in (*ALIASES, Role.INPUT_SCALE):
            param.weight_loader_numel = 0  # type: ignore[attr-defined]  # not awaited by vLLM's layerwise reload
        layer.register_parameter(prefix + role.value, param)
