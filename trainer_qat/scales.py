# SPDX-License-Identifier: Apache-2.0
"""Global scales that do not follow the weights from pass to pass: where they are stored, and how they are taken up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer_qat.inventory import Weight
from trainer_qat.quantizer import shared_amax
from vllm_quads.checkpoint import CheckpointReader, Format
from vllm_quads.checkpoint.info import CheckpointInfo, describe_reader
from vllm_quads.nvfp4 import BlockScaleRule, CheckpointError, ContractError, encode_scale

FROZEN_FILE = Path("quads") / "frozen_amax.safetensors"
"""Where an exported checkpoint keeps the amax values of frozen or moving-average global scales."""


def kept_or_current(weight: Weight, siblings: tuple[nn.Linear, ...], kept: Mapping[str, Tensor] | None) -> Tensor:
    """The loaded amax of a weight, checked; without loaded ones that of the weight and its siblings as they are."""
    if kept is None:
        return shared_amax([m.weight for m in siblings] or [weight.tensor], weight.name)
    if weight.name not in kept:
        raise ContractError(f"{weight.name}: the checkpoint's frozen scales ({FROZEN_FILE}) do not hold it")
    amax = kept[weight.name]
    expected = tuple(weight.tensor.shape[:-2])
    if tuple(amax.shape) != expected:
        raise ContractError(f"{weight.name}: frozen amax has shape {tuple(amax.shape)}, expected {expected}")
    if amax.dtype != torch.float32 or not bool((torch.isfinite(amax) & (amax >= 0)).all()):
        raise ContractError(
            f"{weight.name}: the frozen amax is not float32, finite and at least 0; export the checkpoint again"
        )
    return amax


def load_frozen(checkpoint: Path, weights: Sequence[Weight]) -> dict[str, Tensor]:
    """The amax of each weight or stack that a checkpoint's global scales were taken from.

    An export of ours says it in a file; for any other `quads` checkpoint it is worked out of the stored scales: amax is
    a BF16 number, and only one such number gives a scale. Raises ContractError if this checkpoint cannot say it.
    """
    path = checkpoint / FROZEN_FILE
    try:
        if path.is_file():
            loaded: dict[str, Tensor] = load_file(path)
            return loaded
        with CheckpointReader(checkpoint) as reader:
            info = describe_reader(reader)
            if info.format is not Format.QUADS:
                raise ContractError(
                    f"frozen_from: {checkpoint} is a {info.format.value} checkpoint, expected a `quads` one (exported, "
                    f"or written by `quads quantize`)"
                )
            return {w.name: _stored_amax(reader, info, w) for w in weights}
    except (SafetensorError, OSError) as e:
        raise ContractError(f"frozen_from: {path} cannot be read ({e}); export the checkpoint again") from e
    except CheckpointError as e:
        raise ContractError(f"frozen_from: {e}") from e


def _stored_amax(reader: CheckpointReader, info: CheckpointInfo, weight: Weight) -> Tensor:
    """float32 [...] amax of one weight or stack from the decode scales 1 / g, g = 2688 / amax, on disk."""
    missing = next((name for name in weight.matrices if name not in info.modules), None)
    if missing is not None:
        raise ContractError(f"frozen_from: {missing} is not in NVFP4 in {info.path}; the contracts differ")
    stored = [reader.get(f"{info.modules[name]}.{info.layout.global_scale}") for name in weight.matrices]
    decode = torch.stack([s.reshape(()).to(torch.float32) for s in stored])
    # A matrix of zeros is stored with g = 1, which is also the scale of amax = 2688.
    amax = (decode * BlockScaleRule.MAX_TO_SIX.range).to(torch.bfloat16).to(torch.float32)
    exact = torch.ones_like(decode) / encode_scale(amax) == decode
    if not bool(exact.all()):
        odd = list(weight.matrices)[int((~exact).to(torch.int64).argmax())]
        raise ContractError(
            f"frozen_from: the global scale of {odd} is not that of a BF16 amax, so it cannot be taken up exactly; "
            f"take a checkpoint that QUADS has written"
        )
    if weight.tensor.dim() == 2:
        return amax[0]
    per_expert = amax.reshape(weight.tensor.shape[0], -1)
    if not bool((per_expert == per_expert[:, :1]).all()):
        raise ContractError(
            f"frozen_from: gate and up of {weight.name} have different global scales; take a checkpoint that QUADS has "
            f"written"
        )
    return per_expert[:, 0].contiguous()
