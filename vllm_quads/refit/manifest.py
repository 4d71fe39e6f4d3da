# SPDX-License-Identifier: Apache-2.0
"""What a trainer says before it sends: contract, quantized set, every tensor's shape and dtype, version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from vllm_quads.nvfp4.contract import Contract, QuantizedSet
from vllm_quads.nvfp4.errors import RefitError
from vllm_quads.nvfp4.fingerprint import unit_of
from vllm_quads.nvfp4.names import expand, is_expert_stack


class Rollback(str, Enum):
    """What happens to an engine when a refit fails after its first layer was written."""

    HOST = "host"
    """The previous weights serve on: before a layer is written its bytes are copied to host memory (pinned and kept for
    the next refit on a GPU), and copied back after a failure. Costs the packed model in host memory, and its copy."""
    NONE = "none"
    """Nothing is copied: the engine refuses to serve until a refit succeeds."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a push is going to send."""

    contract: Contract
    quantized: QuantizedSet
    """Canonical names and shapes of the quantized weights; must equal the engine's set."""
    tensors: Mapping[str, TensorSpec]
    """Every tensor of the payload, in the order in which it will be sent. Experts travel as stacks or one by one:

    - BF16: `...experts.gate_up_proj` [E, 2I, H] and `...experts.down_proj` [E, H, I], or `...gate_proj.weight` [N, K];
    - packed: `<stack or matrix>.weight_scale_2` float32 ([E, 2] for gate_up_proj, [E] for down_proj, scalar for a
      matrix), `.weight_scale` E4M3 [..., K/16], `.weight` uint8 [..., K/2], best in this order: what arrives before its
      layer is complete has to be copied;
    - the rest under its checkpoint name.
    """
    policy_version: int
    fingerprint: str | None = None
    """Fingerprint of the quantized weights, if it is known before sending; else digests come with the commit."""
    compensation: Mapping[str, float] = field(default_factory=dict)
    """Optional sensitivities, site name -> mean squared gradient, from the trainer's gradients."""
    rollback: Rollback = Rollback.HOST
    verify: bool = True
    """False: tensors that are not quantized are not digested on arrival, so that no digests of them may come with the
    commit, and ranks do not compare what they got."""

    def __post_init__(self) -> None:
        """Raises RefitError for a version that is no integer and for an unknown way back."""
        version = self.policy_version
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise RefitError(f"policy_version: is {version!r}, expected an integer of at least 0")
        try:
            object.__setattr__(self, "rollback", Rollback(self.rollback))
        except ValueError as e:
            raise RefitError(f"rollback: is {self.rollback!r}, expected one of {[r.value for r in Rollback]}") from e

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dictionary; stacks of experts take one entry."""
        return {
            "contract": self.contract.to_dict(),
            "quantized": _compact(self.quantized),
            "tensors": {n: [str(s.dtype).removeprefix("torch."), *s.shape] for n, s in self.tensors.items()},
            "policy_version": self.policy_version,
            "fingerprint": self.fingerprint,
            "compensation": dict(self.compensation),
            "rollback": self.rollback.value,
            "verify": self.verify,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Inverse of `to_json`. Raises RefitError for data that is no manifest, ContractError for a bad contract."""
        try:
            return Manifest(
                contract=Contract.from_dict(data["contract"]),
                quantized=_expanded(data["quantized"]),
                tensors={n: TensorSpec(tuple(s[1:]), _dtype(n, s[0])) for n, s in data["tensors"].items()},
                policy_version=data["policy_version"],
                fingerprint=data.get("fingerprint"),
                compensation={n: float(v) for n, v in data.get("compensation", {}).items()},
                rollback=data.get("rollback", Rollback.HOST),
                verify=bool(data.get("verify", True)),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise RefitError(f"not a refit manifest ({type(e).__name__}: {e}); send what Manifest.to_json gives") from e


def _dtype(name: str, text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise RefitError(f"{name}: the manifest gives its dtype as {text!r}, which torch does not have")
    return dtype


def _compact(quantized: QuantizedSet) -> dict[str, list[int]]:
    """Name -> [N, K] of single matrices, stack -> [E, N, K] where all experts of a layer have one shape."""
    units: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in quantized.shapes.items():
        units.setdefault(unit_of(name), {})[name] = shape
    out: dict[str, list[int]] = {}
    for unit, matrices in units.items():
        experts = len(matrices) // len(expand(unit, 1)) if is_expert_stack(unit) else 0
        if experts and len(set(matrices.values())) == 1 and set(expand(unit, experts)) == set(matrices):
            out[unit] = [experts, *next(iter(matrices.values()))]
        else:
            out |= {name: list(shape) for name, shape in matrices.items()}
    return out


def _expanded(data: Mapping[str, list[int]]) -> QuantizedSet:
    shapes: dict[str, tuple[int, int]] = {}
    for name, (*experts, n, k) in data.items():
        shapes |= dict.fromkeys(expand(name, experts[0]) if experts else [name], (n, k))
    return QuantizedSet(shapes)
