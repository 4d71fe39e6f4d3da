# SPDX-License-Identifier: Apache-2.0
"""Tensor layouts of the three checkpoint formats: which tensors stand for one packed weight, and their scale direction.

| format               | codes           | block scales   | global scale                        | activation scale     |
|----------------------|-----------------|----------------|-------------------------------------|----------------------|
| quads, modelopt      | `weight`        | `weight_scale` | `weight_scale_2`, decode, scalar    | `input_scale`        |
| compressed-tensors   | `weight_packed` | `weight_scale` | `weight_global_scale`, encode, [1]  | `input_global_scale` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from vllm_quads.checkpoint.headers import TensorHeader
from vllm_quads.nvfp4.errors import CheckpointError, FormatError
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.packed import PackedTensor


class Format(str, Enum):
    """How a checkpoint stores its weights."""

    BF16 = "bf16"
    """Not quantized."""
    QUADS = "quads"
    """ModelOpt's tensors, and a contract in config.json."""
    MODELOPT = "modelopt"
    """NVIDIA ModelOpt NVFP4."""
    COMPRESSED_TENSORS = "compressed-tensors"
    """llm-compressor's `nvfp4-pack-quantized`."""


@dataclass(frozen=True)
class Layout:
    """Names and scale direction of the tensors of one packed weight, relative to its module."""

    codes: str
    block_scales: str
    global_scale: str
    input_scale: str
    encode: bool
    """True if the global scales are stored in encode direction (2688/amax), False for decode (amax/2688)."""
    scale_shapes: tuple[tuple[int, ...], ...]
    """Shapes in which a global scale may be stored; the first one is written."""

    @property
    def scales(self) -> tuple[str, ...]:
        """Every tensor but the codes."""
        return (self.block_scales, self.global_scale, self.input_scale)

    def tensors(self, module: str, packed: PackedTensor, input_scale: float | None = None) -> dict[str, Tensor]:
        """Named tensors of a packed weight [N, K] of `module`; `input_scale` is in decode direction (amax/2688)."""
        shape = self.scale_shapes[0]
        scale = encode_of(packed.decode_scale) if self.encode else packed.decode_scale
        out = {
            f"{module}.{self.codes}": packed.codes,
            f"{module}.{self.block_scales}": packed.block_scales,
            f"{module}.{self.global_scale}": scale.reshape(shape),
        }
        if input_scale is not None:
            value = torch.tensor(input_scale, dtype=torch.float32)
            out[f"{module}.{self.input_scale}"] = (1.0 / value if self.encode else value).reshape(shape)
        return out

    def read(self, module: str, get: Callable[[str], Tensor], name: str) -> PackedTensor:
        """The packed weight of `module`, `get` returning tensors by name; values are not checked."""
        scale = get(f"{module}.{self.global_scale}").reshape(())
        return PackedTensor(
            get(f"{module}.{self.codes}"),
            get(f"{module}.{self.block_scales}"),
            1.0 / scale if self.encode else scale,
            name,
        )

    def check(self, module: str, headers: Mapping[str, TensorHeader]) -> None:
        """Raise CheckpointError for a missing tensor, a wrong dtype or shape, or a K that blocks do not divide."""
        codes = headers[f"{module}.{self.codes}"]
        if len(codes.shape) != 2:
            raise CheckpointError(
                f"{module}.{self.codes}: packed codes have shape {list(codes.shape)}, expected [N, K/2] "
                f"(one matrix per expert)"
            )
        n, half_k = codes.shape
        if half_k == 0 or 2 * half_k % BLOCK_SIZE:
            raise CheckpointError(
                f"{module}.{self.codes}: K = {2 * half_k} is not a multiple of {BLOCK_SIZE}, the NVFP4 block size"
            )
        blocks = (n, 2 * half_k // BLOCK_SIZE)
        for suffix, dtype, shapes, optional in (
            (self.codes, "U8", (codes.shape,), False),
            (self.block_scales, "F8_E4M3", (blocks,), False),
            (self.global_scale, "F32", self.scale_shapes, False),
            (self.input_scale, "F32", self.scale_shapes, True),
        ):
            name = f"{module}.{suffix}"
            header = headers.get(name)
            if header is None and optional:
                continue
            if header is None:
                raise CheckpointError(
                    f"{name}: is missing, but {module}.{self.codes} is packed and needs it; "
                    f"the checkpoint is incomplete"
                )
            if header.dtype != dtype:
                raise CheckpointError(f"{name}: is {header.dtype}, expected {dtype}")
            if header.shape not in shapes:
                raise CheckpointError(
                    f"{name}: has shape {list(header.shape)}, expected {list(shapes[0])} for codes {list(codes.shape)}"
                )


_DECODE = Layout("weight", "weight_scale", "weight_scale_2", "input_scale", encode=False, scale_shapes=((), (1,)))
_ENCODE = Layout(
    "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", encode=True, scale_shapes=((1,), ())
)
LAYOUTS = {Format.QUADS: _DECODE, Format.MODELOPT: _DECODE, Format.COMPRESSED_TENSORS: _ENCODE}
"""Layout of each quantized format."""
SCALE_SUFFIXES = tuple(sorted({s for layout in LAYOUTS.values() for s in layout.scales}))
"""Every name that a scale tensor can end in."""


def encode_of(decode: Tensor) -> Tensor:
    """The float32 encode scale e with f32(1/e) == decode, so that a reader of encode scales gets the same bits.

    Every decode scale that QUADS computes is itself the reciprocal of a float32, and for those e = f32(1/decode) has
    this property (tested for every mantissa). Raises FormatError for a foreign scale that is no such reciprocal.
    """
    encode = 1.0 / decode
    if not bool((1.0 / encode == decode).all()):
        raise FormatError(
            f"global scale {decode.tolist()} is not the reciprocal of a float32, so compressed-tensors cannot store it "
            f"exactly; write the `quads` or `modelopt` format instead"
        )
    return encode
