# SPDX-License-Identifier: Apache-2.0
"""verl (0.9): an FSDP2 actor that trains under fake quantization, and a vLLM rollout that serves its packed weights.

Put this into a module that all workers can import, say `my_quads.py`:

    from trainer_qat.integrations.verl import register
    from vllm_quads.nvfp4 import Contract

    register(Contract())

and start verl with

    actor_rollout_ref.model.external_lib=my_quads
    actor_rollout_ref.actor.strategy=fsdp2
    +actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=quads
    actor_rollout_ref.rollout.calculate_log_probs=True                # verl's own mismatch metrics, rollout_corr/*

A contract other than the default goes to the rollout as `engine_kwargs.vllm.additional_config` (see `engine_kwargs`).

What is used of verl: `EngineRegistry.register` (an engine registered for a vendor goes before the general one), the
engine's `_build_module` and `get_per_tensor_param`, and the rollout adapter's `update_weights`. Weights travel through
verl's own buckets into `model.load_weights`, so a sync is verified after it (fingerprints of trainer and all vLLM
workers are compared), but not atomic. Reference and value models stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainer_qat.integrations.stream import WeightStream, require_fingerprint
from trainer_qat.prepare import is_prepared, prepare_qat
from vllm_quads.nvfp4 import Contract, ContractError, WeightGlobalScale, first_difference

ADAPTER = "trainer_qat.integrations.verl.QuadsServerAdapter"
_registered: dict[str, Contract] = {}


def register(contract: Contract | None = None, qat_options: Mapping[str, Any] | None = None) -> None:
    """Make verl's FSDP2 actor train under `contract`, in this process. Harmless if called again with the same one.

    qat_options: further arguments of `prepare_qat`. Raises ContractError for a second, different contract.
    """
    contract = Contract() if contract is None else contract
    if "actor" in _registered:
        difference = first_difference(_registered["actor"], contract)
        if difference is not None:
            raise ContractError(f"another contract is registered with verl in this process: {difference}")
        return
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.rollout import base

    engine = quads_engine(FSDPEngineWithLMHead, contract, qat_options)
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="nvidia")(engine)
    base._ROLLOUT_REGISTRY[("vllm", "async")] = ADAPTER
    _registered["actor"] = contract


def engine_kwargs(contract: Contract) -> dict[str, Any]:
    """What `actor_rollout_ref.rollout.engine_kwargs.vllm` needs: vLLM's arguments, with JSON for nested ones."""
    return {"quantization": "quads", "additional_config": json.dumps({"quads": contract.to_dict()})}


def quads_engine(base: Any, contract: Contract, qat_options: Mapping[str, Any] | None = None) -> type:
    """A subclass of verl's `FSDPEngineWithLMHead` that prepares its module, and sends it packed.

    Raises ContractError for frozen scales: with meta-device initialisation most ranks have no weights to take them of.
    """
    if contract.weight_global_scale is WeightGlobalScale.FROZEN and "frozen_from" not in (qat_options or {}):
        raise ContractError('weight_global_scale="frozen": name the checkpoint, qat_options={"frozen_from": path}')
    options = dict(qat_options or {})

    class QuadsFSDPEngine(base):
        """Fake-quantized before FSDP2 shards it; a forward-only engine (the reference policy) is left plain."""

        def _build_module(self) -> Any:
            if self.engine_config.strategy != "fsdp2":
                raise ContractError(f"strategy: is {self.engine_config.strategy!r}, QUADS needs 'fsdp2'")
            if self._is_lora:
                raise ContractError("lora_rank: QUADS trains full weights; set actor_rollout_ref.model.lora_rank=0")
            if self._qat_enabled:
                raise ContractError("fsdp_config.qat.enable: is verl's own QAT; switch it off, QUADS replaces it")
            module = super()._build_module()
            if not self.engine_config.forward_only:
                prepare_qat(module, contract, **options)
            return module

        def get_per_tensor_param(
            self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
        ) -> Any:
            if not is_prepared(self.module):
                return super().get_per_tensor_param(layered_summon, base_sync_done, **kwargs)
            if self.is_param_offload_enabled:  # verl moves it back after the sync
                self.to("cuda", model=True, optimizer=False, grad=False)
            return WeightStream(self.module), None

    return QuadsFSDPEngine


def quads_server_adapter(base: Any) -> type:
    """A subclass of verl's vLLM `ServerAdapter` that compares fingerprints after each update of weights."""

    class QuadsServerAdapter(base):
        """As verl's. A stream that comes from elsewhere than `quads_engine` is passed on unverified."""

        async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
            await super().update_weights(weights, *args, **kwargs)
            if isinstance(weights, WeightStream) and weights.fingerprint is not None and self._has_server:
                answers = await self._execute_method("weight_transfer_engine", args=("fingerprint",))
                require_fingerprint(weights.fingerprint, answers)

    return QuadsServerAdapter


def __getattr__(name: str) -> Any:
    """`QuadsServerAdapter`, made when verl asks for it by name, so that this module imports without verl."""
    if name != "QuadsServerAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    return quads_server_adapter(ServerAdapter)
