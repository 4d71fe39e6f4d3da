# SPDX-License-Identifier: Apache-2.0
"""A refit inside the process that holds the model: validate, stage, swap in, verify, or roll back.

Staging keeps copies, so serving weights do not change until `commit`, and the trainer may reuse its buffers at once.
`commit` keeps an undo copy of every parameter until the fingerprint has been compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm_quads.compensation import SiteState, refresh, uses_blocks
from vllm_quads.nvfp4 import (
    Centering,
    MismatchError,
    QuadsError,
    RefitError,
    Scheme,
    fingerprint,
    first_difference,
    packed_digest,
)
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.inventory import Inventory, TensorName
from vllm_quads.plugin.loading import Role
from vllm_quads.plugin.runtime import ExpertsRuntime, LayerRuntime, LinearRuntime
from vllm_quads.refit import Manifest, TensorSpec


def config_of(model: nn.Module) -> QuadsConfig:
    """The quads config of a loaded model. Raises RefitError if the model was not loaded with quantization="quads"."""
    for module in model.modules():
        if isinstance(module, LayerRuntime):
            return cast(QuadsConfig, module.config)
    raise RefitError(
        'the engine was not started with quantization="quads"; start it with LLM(model, quantization="quads")'
    )


def model_fingerprint(config: QuadsConfig) -> str:
    """Fingerprint of the quantized weights that are serving: packed codes, block scales and global scales."""
    digests = {}
    for runtime in config.runtimes.values():
        for matrix in runtime.loader.matrices:
            digests[matrix.name] = int(packed_digest(runtime.loader.packed(matrix)))
    return fingerprint(digests)


def refresh_compensation(config: QuadsConfig, sensitivities: Mapping[str, float] | None = None) -> int:
    """Choose channel sets and centring vectors anew from gathered statistics; returns the number of sites.

    Sites that have seen no token keep their state. Without `sensitivities`, those of the last time are used.
    """
    contract = config.contract
    wanted = uses_blocks(contract) or contract.activation.centering is not Centering.NONE
    if contract.scheme is not Scheme.W4A4 or not wanted:
        return 0
    sites = {}
    for runtime in config.runtimes.values():
        assert isinstance(runtime, (ExpertsRuntime, LinearRuntime))
        sites.update(runtime.site_inputs())
    if not sites:
        return 0
    chosen = refresh(sites, contract, dict(sensitivities or config.sensitivities))
    before = config.compensation()
    merged: dict[str, SiteState] = {**before.sites, **chosen.sites}
    config.set_compensation(type(before)(merged, chosen.sensitivities))
    return len(sites)


class StagedRefit:
    """One refit from manifest to commit. Methods raise RefitError; after an error the object is of no further use."""

    def __init__(self, model: Any, manifest: Manifest) -> None:
        self._model = model
        self._manifest = manifest
        self._config = config_of(model)
        self._staged: dict[str, Tensor] = {}
        difference = first_difference(manifest.contract, self._config.contract)
        if difference is not None:
            raise RefitError(f"trainer and rollout have different contracts: {difference} (trainer != rollout)")
        assert self._config.quantized is not None
        try:
            manifest.quantized.require_equal(self._config.quantized)
        except MismatchError as e:
            raise RefitError(str(e)) from e
        Inventory.of(model, self._config).check(manifest.tensors)
        sites = {name for runtime in self._config.runtimes.values() for name in runtime.specs}
        unknown = sorted(set(manifest.compensation) - sites)
        if unknown:
            raise RefitError(
                f"sensitivities: {unknown[0]} is no quantized site of this engine (sites look like {min(sites)!r}); "
                f"take them from the model that is pushed"
            )

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors aside. Raises RefitError for a tensor that the manifest does not promise or that is damaged."""
        for name, tensor in tensors:
            spec = self._manifest.tensors.get(name)
            if spec is None:
                raise RefitError(f"{name}: is not in the manifest of this push")
            if name in self._staged:
                raise RefitError(f"{name}: was already sent in this push")
            if TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
                raise RefitError(
                    f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, the manifest promised {spec.dtype} {spec.shape}"
                )
            _check_values(name, tensor)
            self._staged[name] = tensor.detach().clone()

    def commit(self) -> tuple[str, int]:
        """Swap the staged weights in; returns (fingerprint, bytes). On any failure the old weights serve on."""
        missing = next((n for n in self._manifest.tensors if n not in self._staged), None)
        if missing is not None:
            raise RefitError(
                f"{missing}: was promised by the manifest but never sent; the previous weights keep serving"
            )
        undo = [(p, p.data.clone()) for p in self._model.parameters()]
        state = self._config.compensation()
        try:
            self._load_staged()
            got = model_fingerprint(self._config)
            if got != self._manifest.fingerprint:
                raise RefitError(
                    f"the rollout arrived at fingerprint {got}, the trainer at {self._manifest.fingerprint}: they do "
                    f"not hold the same quantized weights"
                )
            sensitivities = {n: float(v) for n, v in self._manifest.compensation.items()}
            refresh_compensation(self._config, sensitivities)
            if sensitivities:
                self._config.sensitivities = sensitivities
        except BaseException as e:  # also an interrupt must not leave half of the weights swapped
            with torch.no_grad():
                for param, old in undo:
                    param.data.copy_(old)
            for runtime in self._config.runtimes.values():
                runtime.loader.forget_partial()
            self._config.set_compensation(state)
            if not isinstance(e, Exception):
                raise
            if isinstance(e, RefitError):
                raise RefitError(f"{e}; the previous weights keep serving") from e
            kind = "" if isinstance(e, QuadsError) else f"{type(e).__name__}: "
            raise RefitError(f"refit failed ({kind}{e}); the previous weights keep serving") from e
        for runtime in self._config.runtimes.values():
            runtime.reset_statistics()
        self._config.policy_version = self._manifest.policy_version
        size = sum(t.nbytes for t in self._staged.values())
        self._staged.clear()
        return got, size

    @torch.no_grad()
    def _load_staged(self) -> None:
        device = next(self._model.parameters()).device
        named = ((self._engine_name(name), t) for name, t in self._staged.items())
        with device:
            self._model.load_weights(named)
        for runtime in self._config.runtimes.values():
            runtime.loader.check_settled()
            runtime.settle_for_graphs()

    def _engine_name(self, name: str) -> str:
        return self._config.disk_name(str(TensorName.parse(name)))


def _check_values(name: str, tensor: Tensor) -> None:
    suffix = TensorName.parse(name).suffix
    if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn:
        if not bool(torch.isfinite(tensor).all()):
            raise RefitError(f"{name}: holds NaN or Inf; the trainer has diverged. The previous weights keep serving")
        scalar = suffix in (
            r.value for r in (Role.DECODE_SCALE, Role.ENCODE_SCALE, Role.INPUT_SCALE, Role.INPUT_ENCODE_SCALE)
        )
        if scalar and float(tensor.reshape(())) <= 0:
            raise RefitError(f"{name}: is {float(tensor.reshape(()))}, expected a positive scale")
    elif tensor.dtype == torch.float8_e4m3fn:
        raw = tensor.view(torch.uint8)
        if bool((raw >= 0x7F).any()):
            raise RefitError(f"{name}: holds NaN or negative block scales; the previous weights keep serving")


__all__ = ["StagedRefit", "config_of", "model_fingerprint", "refresh_compensation"]
