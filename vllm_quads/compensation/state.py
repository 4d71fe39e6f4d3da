# SPDX-License-Identifier: Apache-2.0
"""The state of compensation: channel sets and centring vectors, per site.

A site is one GEMM operand of one layer: `model.layers.3.mlp.experts.w13` (one input for all experts),
`model.layers.3.mlp.experts.w2` (one input per expert), or a dense linear under its scale group,
`model.layers.3.self_attn.qkv_proj`. The state changes only at a refit or by an explicit call, has a
fingerprint of its own, and is saved beside the checkpoint's shards as `quads/compensation.safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_quads.nvfp4.errors import CheckpointError, FormatError
from vllm_quads.nvfp4.fingerprint import matrix_digest, unit_fingerprint
from vllm_quads.nvfp4.formats import BLOCK_SIZE

STATE_FILE = Path("quads") / "compensation.safetensors"
"""Where a checkpoint directory keeps its state; in a subfolder, so that weight loaders do not take it for a shard."""


@dataclass(frozen=True)
class SiteState:
    """State of one site with K channels and G groups (experts for w2, else 1)."""

    center: Tensor
    """float32 [K]: subtracted from the input before it is quantized; zeros mean no centring."""
    blocks: Tensor
    """bool [G, K/16]: blocks whose residual the appended form multiplies."""

    def __post_init__(self) -> None:
        k = self.center.shape[-1]
        if self.center.dim() != 1 or self.center.dtype != torch.float32 or k % BLOCK_SIZE:
            raise FormatError(
                f"center is {self.center.dtype} {tuple(self.center.shape)}, expected float32 [K], K % 16 == 0"
            )
        if not bool(torch.isfinite(self.center).all()):
            raise FormatError("center holds NaN or Inf; gather the statistics again")
        if self.blocks.dtype != torch.bool or self.blocks.dim() != 2 or self.blocks.shape[1] != k // BLOCK_SIZE:
            raise FormatError(
                f"blocks is {self.blocks.dtype} {tuple(self.blocks.shape)}, expected bool [groups, {k // BLOCK_SIZE}]"
            )

    @staticmethod
    def empty(k: int, groups: int = 1, device: torch.device | str = "cpu") -> SiteState:
        """No centring, no blocks."""
        return SiteState(
            torch.zeros(k, device=device), torch.zeros(groups, k // BLOCK_SIZE, dtype=torch.bool, device=device)
        )


@dataclass(frozen=True)
class CompensationState:
    """State of every site of a model, and the sensitivities it was chosen with."""

    sites: Mapping[str, SiteState] = field(default_factory=dict)
    sensitivities: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        chosen = sum(int(s.blocks.sum()) for s in self.sites.values())
        blocks = sum(s.blocks.numel() for s in self.sites.values())
        centred = sum(bool(s.center.any()) for s in self.sites.values())
        return f"CompensationState({len(self.sites)} sites, {chosen} of {blocks} blocks, {centred} centred)"

    def digests(self) -> dict[str, int]:
        """Digest of each site, to be merged into a fingerprint."""
        return {
            name: int(matrix_digest(s.center[None])) * 3 + int(matrix_digest(s.blocks.to(torch.uint8)))
            for name, s in self.sites.items()
        }

    def fingerprint(self) -> str:
        """16 hex digits over all sites."""
        return unit_fingerprint(self.digests())

    def save(self, checkpoint: Path) -> Path:
        """Write `quads/compensation.safetensors` below a checkpoint directory, atomically; returns its path."""
        path = Path(checkpoint) / STATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{n}.sensitivity": torch.tensor(v, dtype=torch.float64) for n, v in self.sensitivities.items()}
        for name, site in self.sites.items():
            # Cloned: sites may be views of one buffer, which safetensors refuses to write.
            tensors[f"{name}.center"] = site.center.cpu().clone(memory_format=torch.contiguous_format)
            tensors[f"{name}.blocks"] = site.blocks.cpu().to(torch.uint8, memory_format=torch.contiguous_format)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, path)
        return path

    @staticmethod
    def load(checkpoint: Path) -> CompensationState | None:
        """Read the state of a checkpoint directory; None if it has none. Raises CheckpointError if it is damaged."""
        path = Path(checkpoint) / STATE_FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as f:
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{path}: cannot be read ({e}); write it again with `quads quantize --calibrate`"
            ) from e
        parts: dict[str, dict[str, Tensor]] = {"center": {}, "blocks": {}, "sensitivity": {}}
        try:
            for key, tensor in tensors.items():
                name, _, part = key.rpartition(".")
                parts[part][name] = tensor
            names = sorted({*parts["center"], *parts["blocks"]})
            sites = {n: SiteState(parts["center"][n], parts["blocks"][n].to(torch.bool)) for n in names}
            sensitivities = {n: v.item() for n, v in parts["sensitivity"].items()}
        except KeyError as e:
            raise CheckpointError(
                f"{path}: site or tensor {e} is incomplete or unknown; write it again with `quads quantize --calibrate`"
            ) from e
        except (FormatError, RuntimeError) as e:
            raise CheckpointError(f"{path}: {e}; write it again with `quads quantize --calibrate`") from e
        return CompensationState(sites, sensitivities)
