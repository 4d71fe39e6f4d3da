# SPDX-License-Identifier: Apache-2.0
"""What a refit is compared with: the manifest with this engine before a byte moves, digests of both sides after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vllm_quads.nvfp4 import MismatchError, RefitError, first_difference, unit_fingerprint
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.digests import MODULO
from vllm_quads.plugin.inventory import Inventory, Plan
from vllm_quads.plugin.open_refit import OpenRefit
from vllm_quads.refit import Manifest, TensorSpec


def planned(manifest: Manifest, config: QuadsConfig, inventory: Inventory) -> Plan:
    """Where each announced tensor goes.

    Raises RefitError naming the first difference in contract, set, names, shapes, dtypes, version or sites.
    """
    difference = first_difference(manifest.contract, config.contract)
    if difference is not None:
        raise RefitError(f"trainer and rollout have different contracts: {difference} (trainer != rollout)")
    if manifest.quantized.shapes != inventory.quantized:
        assert config.quantized is not None
        try:
            manifest.quantized.require_equal(config.quantized)
        except MismatchError as e:
            raise RefitError(str(e)) from e
    if manifest.policy_version <= config.policy_version:
        raise RefitError(
            f"policy version {manifest.policy_version} is not newer than {config.policy_version}, which serves; "
            f"count on from the engine's version (leave policy_version out)"
        )
    plan = inventory.plan(manifest.tensors)
    for slot in plan.slots.values():
        if slot.field == "float":
            slot.unit.runtime.loader.frozen_amax(slot.unit.matrices)
    _check_sensitivities(manifest.compensation, config)
    return plan


def _check_sensitivities(sensitivities: Mapping[str, float], config: QuadsConfig) -> None:
    for site, value in sensitivities.items():
        if not 0 <= value < math.inf:
            raise RefitError(f"sensitivities[{site!r}]: is {value}, expected a finite number of at least 0")
    if not sensitivities:
        return
    sites = {name for runtime in config.runtimes.values() for name in runtime.specs}
    unknown = sorted(set(sensitivities) - sites)
    if unknown:
        raise RefitError(
            f"sensitivities: {unknown[0]} is no quantized site of this engine (sites look like {min(sites)!r}); "
            f"take them from the model that is pushed"
        )


def check_parallel(parallel: Any) -> None:
    """Raise RefitError for kinds of parallelism that cannot be refitted as one. parallel: vLLM's `ParallelConfig`."""
    replicas, stages = parallel.data_parallel_size, parallel.pipeline_parallel_size
    if replicas > 1:
        raise RefitError(
            f"data_parallel_size={replicas}: replicas cannot be refitted as one yet; start one server per replica "
            f"and push to each"
        )
    if stages > 1:
        raise RefitError(
            f"pipeline_parallel_size={stages}: a rank that has some of the layers cannot check a whole push yet; "
            f"use tensor_parallel_size, with enable_expert_parallel for many experts"
        )


def check_promised(spec: TensorSpec | None, outstanding: set[str], name: str, tensor: Tensor) -> None:
    """Raise RefitError for a tensor that the manifest does not promise, or not like this, or not twice."""
    if spec is None:
        raise RefitError(f"{name}: is not in the manifest of this push")
    if name not in outstanding:
        raise RefitError(f"{name}: was already sent in this push")
    if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
        raise RefitError(
            f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, the manifest promised {spec.dtype} {spec.shape}"
        )


def require_undisturbed(refit: OpenRefit, config: QuadsConfig) -> None:
    """Raise RefitError if weights have been loaded in another way since the refit began, or since it wrote them."""
    loaders = {key: runtime.loader for key, runtime in config.runtimes.items()}
    first = next((key for key, version in refit.versions.items() if loaders[key].version != version), None)
    if first is not None or config.reloads.count != refit.reloads:
        name = "" if first is None else loaders[first].matrices[0].name
        what = "weights were reloaded" if first is None else f"{name}: was loaded in another way"
        raise RefitError(f"{what} while the refit was under way; load weights before a push or after it")


def compare_digests(manifest: Manifest, own: Mapping[str, int], theirs: Mapping[str, int] | None) -> None:
    """Raise RefitError naming the first unit that the trainer digested otherwise, or if the fingerprints differ."""
    if theirs is not None and (unit := _first_difference(own, theirs)) is not None:
        raise RefitError(
            f"{unit}: the rollout arrived at other bytes than the trainer (digest {_hex(own.get(unit))} != "
            f"{_hex(theirs.get(unit))}): they do not hold the same quantized weights"
        )
    fingerprint = unit_fingerprint(own)
    if manifest.fingerprint is not None and fingerprint != manifest.fingerprint:
        raise RefitError(
            f"the rollout arrived at fingerprint {fingerprint}, the trainer at {manifest.fingerprint}: they do "
            f"not hold the same quantized weights"
        )


def compare_plain(own: Mapping[str, int] | None, theirs: Mapping[str, int] | None) -> None:
    """Raise RefitError naming the first tensor, not quantized, that arrived with other bytes than the trainer sent.

    own: None if nothing was digested on arrival; theirs: None if there is nothing to compare with.
    """
    if theirs is None:
        return
    if own is None:
        raise RefitError("digests came with the commit of a push whose manifest has verify=False; leave them out")
    name = _first_difference(own, theirs)
    if name is not None:
        raise RefitError(
            f"{name}: arrived with other bytes than the trainer sent (digest {_hex(own.get(name))} != "
            f"{_hex(theirs.get(name))})"
        )


def compare_ranks(ranks: Sequence[Mapping[str, int] | None]) -> None:
    """Raise RefitError naming the first tensor, not quantized, of which ranks have got different bytes."""
    first = ranks[0] or {}
    for rank, other in enumerate(ranks):
        name = _first_difference(first, other or {})
        if name is not None:
            raise RefitError(
                f"the ranks of this engine are to get different weights: {name} has digest {_hex(first.get(name))} on "
                f"rank 0, {_hex((other or {}).get(name))} on rank {rank}; push one policy on all of them"
            )


def _first_difference(own: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """The first name that has another digest (modulo 2^64) on the other side, or none there; None if there is none."""
    names = dict.fromkeys((*own, *theirs))
    return next((n for n in names if n not in own or n not in theirs or (own[n] - theirs[n]) % MODULO), None)


def _hex(digest: int | None) -> str:
    return "none" if digest is None else f"{digest % MODULO:016x}"


__all__ = [
    "check_parallel",
    "check_promised",
    "compare_digests",
    "compare_plain",
    "compare_ranks",
    "planned",
    "require_undisturbed",
]
