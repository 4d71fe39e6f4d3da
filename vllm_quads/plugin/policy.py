# SPDX-License-Identifier: Apache-2.0
"""What a loaded model of this rank serves: its config, the digests of its weights, its compensation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn

from vllm_quads.compensation import SiteState, refresh, uses_blocks
from vllm_quads.nvfp4 import Centering, RefitError, Scheme, unit_fingerprint
from vllm_quads.plugin import compat
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.digests import DigestTable, over_ranks
from vllm_quads.plugin.runtime import ExpertsRuntime, LayerRuntime, LinearRuntime
from vllm_quads.plugin.units import units_of
from vllm_quads.refit.report import REFUSES, without_outcome


def config_of(model: nn.Module) -> QuadsConfig:
    """The quads config of a loaded model. Raises RefitError if the model was not loaded with quantization="quads"."""
    for module in model.modules():
        if isinstance(module, LayerRuntime):
            return cast(QuadsConfig, module.config)
    raise RefitError(
        'the engine was not started with quantization="quads"; start it with LLM(model, quantization="quads")'
    )


def model_digests(config: QuadsConfig) -> dict[str, int]:
    """Digest of every unit that is serving, added up over tensor-parallel ranks; all ranks have to ask."""
    units = [unit for key, runtime in config.runtimes.items() for unit in units_of(key, runtime)]
    device = next(b.device for r in config.runtimes.values() for b in r.buffers())
    return over_ranks(DigestTable(units, device).of_what_serves(units))


def model_fingerprint(config: QuadsConfig) -> str:
    """Fingerprint of the quantized weights that are serving: packed codes, block scales and global scales."""
    return unit_fingerprint(model_digests(config))


def refuse_together(config: QuadsConfig) -> int | None:
    """If one rank cannot serve, none does: returns the first such rank where this one could, else None. A collective.

    A rank that was refused before it wrote anything would otherwise wait in its forward pass for one that refuses.
    """
    refusals = compat.gather(config.refusal)
    broken = next((rank for rank, reason in enumerate(refusals) if reason is not None), None)
    if broken is None or config.refusal is not None:
        return None
    config.refusal = f"rank {broken}: {refusals[broken]}"
    return broken


def end_together(config: QuadsConfig, error: str | None) -> str | None:
    """Let no rank serve if one cannot, or if some have committed and others have not. A collective, after a commit.

    error: why this rank has not committed, or None. Returns what is wrong where this rank, by itself, could serve.
    """
    ends = compat.gather((error, config.refusal, config.policy_version))
    failed = next((rank for rank, (text, _, _) in enumerate(ends) if text is not None), None)
    broken = next((rank for rank, (_, refusal, _) in enumerate(ends) if refusal is not None), None)
    if failed is not None and any(text is None for text, _, _ in ends):
        config.policy_version = max(version for _, _, version in ends)  # or the ranks would count on differently
        reason = f"rank {failed} could not commit what other ranks have committed: {without_outcome(ends[failed][0])}"
        outcome = f"{reason}; {REFUSES}"
    elif broken is not None and config.refusal is None:
        reason, outcome = f"rank {broken}: {ends[broken][1]}", f"on rank {broken} {REFUSES}"
    else:
        return None
    if config.refusal is None:
        config.refusal = reason
    return outcome


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


__all__ = [
    "config_of",
    "end_together",
    "model_digests",
    "model_fingerprint",
    "refresh_compensation",
    "refuse_together",
]
