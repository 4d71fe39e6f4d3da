# SPDX-License-Identifier: Apache-2.0
"""MoE layer shapes, by name or in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vllm_quads.nvfp4.errors import QuadsError
from vllm_quads.nvfp4.formats import BLOCK_SIZE


@dataclass(frozen=True)
class MoEShape:
    """What one GPU holds of one MoE layer."""

    name: str
    experts: int
    """Experts on this GPU."""
    top_k: int
    """(token, expert) pairs per token that land on this GPU."""
    hidden: int
    intermediate: int
    note: str = ""

    def __post_init__(self) -> None:
        for field in ("experts", "top_k", "hidden", "intermediate"):
            if getattr(self, field) < 1:
                raise QuadsError(f"--{field.replace('_', '-')}: is {getattr(self, field)}, expected 1 or more")
        for field in ("hidden", "intermediate"):
            if getattr(self, field) % BLOCK_SIZE:
                raise QuadsError(f"--{field}: is {getattr(self, field)}, expected a multiple of {BLOCK_SIZE}")
        if self.top_k > self.experts:
            raise QuadsError(f"--top-k: is {self.top_k}, but there are only {self.experts} experts to choose from")

    @property
    def weights_per_expert(self) -> int:
        """Elements of w1, w3 and w2 of one expert."""
        return 3 * self.hidden * self.intermediate

    def to_dict(self) -> dict[str, int | str]:
        """JSON-ready."""
        return asdict(self)


SHAPES = {
    s.name: s
    for s in (
        MoEShape("qwen3-30b-a3b", 128, 8, 2048, 768, "Qwen3-30B-A3B, all experts on one GPU"),
        MoEShape(
            "deepseek-v3-ep8",
            32,
            8,
            7168,
            2048,
            "one of 8 expert-parallel ranks: 32 of 256 experts; each of 8 ranks brings M tokens, so 8M pairs land here",
        ),
        MoEShape("mixtral-8x7b", 8, 2, 4096, 14336, "Mixtral 8x7B, all experts on one GPU"),
    )
}


def shape_named(name: str) -> MoEShape:
    """A shape of `SHAPES`. Raises QuadsError naming those that exist."""
    if name not in SHAPES:
        raise QuadsError(f"--shape: {name!r} is not one of {', '.join(SHAPES)}; give your own with --experts and so on")
    return SHAPES[name]
