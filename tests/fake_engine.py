# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in memory: follows the refit protocol, records, and can be told to fail."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vllm_quads.nvfp4 import (
    Contract,
    PackedTensor,
    QuantizedSet,
    RefitError,
    canonical_name,
    fingerprint,
    packed_digest,
    scale_group,
    weight_amax,
)
from vllm_quads.refit import Manifest, RefitReport


class FakeEngine:
    """Keeps serving and staged tensors; computes its fingerprint from what it received."""

    def __init__(self, contract: Contract, quantized: QuantizedSet) -> None:
        self._contract, self._quantized = contract, quantized
        self.serving: dict[str, Tensor] = {}
        self.staged: dict[str, Tensor] = {}
        self.version = 0
        self.manifest: Manifest | None = None
        self.calls: list[str] = []
        self.fail_after: int | None = None
        """Tensors after which `load` fails."""
        self.corrupt = False
        """Flip a bit of what arrives."""
        self.most_at_once = 0

    def contract(self) -> Contract:
        """Contract it was started with."""
        return self._contract

    def quantized(self) -> QuantizedSet:
        """Set it quantizes."""
        return self._quantized

    def policy_version(self) -> int:
        """Version that serves."""
        return self.version

    def fingerprint(self) -> str:
        """Fingerprint of the serving weights."""
        return self._fingerprint(self.serving) if self.serving else fingerprint({})

    def _fingerprint(self, tensors: dict[str, Tensor]) -> str:
        digests = {}
        disk = {canonical_name(n): n.removesuffix(".weight") for n in tensors if n.endswith(".weight")}
        for name in self._quantized.shapes:
            module = disk[name]
            codes = tensors[f"{module}.weight"]
            if codes.dtype == torch.bfloat16:
                siblings = [tensors[f"{disk[s]}.weight"] for s in disk if scale_group(s) == scale_group(name)]
                packed = PackedTensor.quantize(codes, amax=torch.stack([weight_amax(s) for s in siblings]).amax())
            else:
                packed = PackedTensor(codes, tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"])
            digests[name] = int(packed_digest(packed))
        return fingerprint(digests)

    def begin(self, manifest: Manifest) -> None:
        """Stage nothing yet."""
        self.calls.append("begin")
        self.manifest, self.staged = manifest, {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors; refuse what the manifest does not announce."""
        self.calls.append("load")
        assert self.manifest is not None
        for name, tensor in tensors:
            if self.fail_after is not None and len(self.staged) >= self.fail_after:
                raise OSError("connection lost")
            spec = self.manifest.tensors.get(name)
            if spec is None or (spec.shape, spec.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise RefitError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, announced was {spec}")
            self.staged[name] = tensor.clone()

    def commit(self) -> RefitReport:
        """Swap."""
        self.calls.append("commit")
        assert self.manifest is not None
        missing = sorted(set(self.manifest.tensors) - set(self.staged))
        if missing:
            raise RefitError(f"{missing[0]}: was announced but not sent")
        if self.corrupt:
            name = next(n for n, t in self.staged.items() if t.dtype == torch.uint8)
            self.staged[name][0, 0] ^= 1
        self.serving, self.staged = self.staged, {}
        self.version = self.manifest.policy_version
        size = sum(t.nbytes for t in self.serving.values())
        return RefitReport(self.version, self.fingerprint(), len(self.serving), size, {"commit": 0.0})

    def abort(self) -> None:
        """Forget what was staged."""
        self.calls.append("abort")
        self.staged = {}
