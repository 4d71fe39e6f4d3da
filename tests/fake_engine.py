# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in memory: follows the refit protocol, records, and can be told to fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vllm_quads.nvfp4 import (
    Contract,
    PackedTensor,
    QuantizedSet,
    RefitError,
    canonical_name,
    expand,
    fingerprint,
    packed_digest,
    scale_group,
    weight_amax,
)
from vllm_quads.nvfp4.names import is_expert_stack
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
        packed = self.packed()
        return fingerprint({name: int(packed_digest(p)) for name, p in packed.items()})

    def packed(self) -> dict[str, PackedTensor]:
        """Every quantized matrix that serves, by canonical name."""
        out: dict[str, PackedTensor] = {}
        plain: dict[str, Tensor] = {}
        for name, tensor in self.serving.items():
            module = canonical_name(name)
            if not any(n in self._quantized for n in (module, *self._members(module, tensor))):
                continue
            if tensor.dtype == torch.uint8:
                module_on_wire = name.removesuffix(".weight")
                scales = self.serving[f"{module_on_wire}.weight_scale"]
                decode = self.serving[f"{module_on_wire}.weight_scale_2"]
                parts = self._matrices(module, tensor), self._matrices(module, scales)
                for i, n in enumerate(parts[0]):
                    out[n] = PackedTensor(parts[0][n], parts[1][n], decode.flatten()[i], n)
            elif not name.endswith(("_scale", "_scale_2")):
                plain |= self._matrices(module, tensor)
        groups: dict[str, list[Tensor]] = {}
        for n, t in plain.items():
            groups.setdefault(scale_group(n), []).append(weight_amax(t))
        for n, t in plain.items():
            out[n] = PackedTensor.quantize(t, amax=torch.stack(groups[scale_group(n)]).amax(), name=n)
        return out

    @staticmethod
    def _members(module: str, tensor: Tensor) -> list[str]:
        return expand(module, tensor.shape[0]) if is_expert_stack(module) and tensor.dim() == 3 else [module]

    def _matrices(self, module: str, tensor: Tensor) -> dict[str, Tensor]:
        names = self._members(module, tensor)
        if len(names) == 1:
            return {module: tensor}
        rows = tensor.shape[0] * tensor.shape[1] // len(names)
        return dict(zip(names, tensor.reshape(len(names), rows, -1), strict=True))

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

    def commit(self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None) -> RefitReport:
        """Swap, and believe anything: the trainer looks at the fingerprint too."""
        self.calls.append("commit")
        assert self.manifest is not None
        missing = sorted(set(self.manifest.tensors) - set(self.staged))
        if missing:
            raise RefitError(f"{missing[0]}: was announced but not sent")
        if self.corrupt:
            name = next(n for n, t in self.staged.items() if t.dtype == torch.uint8)
            self.staged[name].view(-1)[0] ^= 1
        self.serving, self.staged = self.staged, {}
        self.version = self.manifest.policy_version
        size = sum(t.nbytes for t in self.serving.values())
        return RefitReport(self.version, self.fingerprint(), len(self.serving), size, {"commit": 0.0})

    def abort(self) -> None:
        """Forget what was staged."""
        self.calls.append("abort")
        self.staged = {}
