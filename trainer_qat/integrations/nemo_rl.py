# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL: a DTensor policy (worker v2) that trains under fake quantization, and a vLLM rollout of its packed weights.

A worker is a Ray actor, so its class lives in a module of yours, say `my_quads.py`:

    import ray
    from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2Impl
    from trainer_qat.integrations.nemo_rl import quads_policy_worker

    QuadsPolicyWorker = ray.remote(quads_policy_worker(DTensorPolicyWorkerV2Impl))

Register it with NeMo-RL before the policy is made, and name it to the policy:

    ACTOR_ENVIRONMENT_REGISTRY["my_quads.QuadsPolicyWorker"] = PY_EXECUTABLES.AUTOMODEL
    policy = Policy(..., worker_extension_cls_fqn="my_quads.QuadsPolicyWorker")

The configuration needs `generation_config(contract)` under `policy.generation`, and `policy.dtensor_cfg._v2: true` with
a Hugging Face model (`force_hf: true`), `tensor_parallel_size: 1` and no LoRA.

What is used of NeMo-RL (read at 7ea279ab, August 2026): the worker's `prepare_refit_info`,
`stream_weights_via_ipc_zmq`, `broadcast_weights_for_collective` and `use_reference_model`. Weights travel through
NeMo-RL's own transport into `model.load_weights`, so a refit is not atomic, and NeMo-RL has no hook to ask its vLLM
workers for their fingerprint; `get_quads_fingerprint` tells what was sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_qat.integrations.stream import WeightStream
from trainer_qat.prepare import prepare_qat, qat_disabled
from vllm_quads.nvfp4 import Contract, ContractError


def generation_config(contract: Contract | None = None) -> dict[str, Any]:
    """What `policy.generation` needs: vLLM's arguments, with raw log-probs replaced by those that were sampled from."""
    contract = Contract() if contract is None else contract
    return {
        "vllm_kwargs": {"quantization": "quads", "additional_config": {"quads": contract.to_dict()}},
        "vllm_cfg": {"logprobs_mode": "processed_logprobs"},
    }


def quads_policy_worker(
    base: Any, contract: Contract | None = None, qat_options: Mapping[str, Any] | None = None
) -> type:
    """A subclass of NeMo-RL's `DTensorPolicyWorkerV2Impl` whose model is fake-quantized and refitted packed."""
    options = dict(qat_options or {})

    class QuadsPolicyWorker(base):
        """The reference policy, whose weights NeMo-RL swaps into the same model, is scored without quantization."""

        model: Any

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if self.lora_enabled:
                raise ContractError("dtensor_cfg.lora_cfg.enabled: QUADS trains full weights; switch LoRA off")
            if self.tp_size != 1:
                raise ContractError(f"tensor_parallel_size: is {self.tp_size}, QUADS needs 1 (FSDP2 shards the model)")
            self.qat_report = prepare_qat(self.model, contract, **options)
            self.quads_fingerprint: str | None = None

        def prepare_refit_info(self) -> dict[str, Any]:
            """Name -> (shape, dtype) of what is streamed."""
            specs = WeightStream(self.model).specs()
            return {name: (torch.Size(spec.shape), spec.dtype) for name, spec in specs.items()}

        def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int = 0, kv_scales: Any = None) -> None:
            """To a colocated engine."""
            from nemo_rl.models.policy.utils import stream_weights_via_ipc_zmq_impl

            self.maybe_init_zmq()
            with self._streamed(kv_scales) as tensors:
                stream_weights_via_ipc_zmq_impl(
                    params_generator=tensors,
                    buffer_size_bytes=buffer_size_bytes,
                    zmq_socket=self.zmq_socket,
                    rank=self.rank,
                    worker_name=str(self),
                )

        def broadcast_weights_for_collective(
            self, kv_scales: Any = None, *, buffer_size_bytes: int | None = None, num_buffers: int | None = None
        ) -> None:
            """To engines of their own."""
            from nemo_rl.utils.packed_tensor import packed_broadcast_producer

            with self._streamed(kv_scales) as tensors:
                packed_broadcast_producer(
                    iterator=tensors,
                    group=self.model_update_group,
                    src=0,
                    post_iter_func=lambda pair: pair[1],
                    buffer_size_bytes=buffer_size_bytes,
                    num_buffers=num_buffers,
                )

        def get_quads_fingerprint(self) -> str | None:
            """Of the weights that were streamed last."""
            return self.quads_fingerprint

        @contextlib.contextmanager
        def use_reference_model(self) -> Iterator[None]:
            """NeMo-RL's, without fake quantization."""
            with super().use_reference_model(), qat_disabled(self.model):
                yield

        @contextlib.contextmanager
        def _streamed(self, kv_scales: Any) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
            if kv_scales is not None:
                raise ContractError("kv_scales: NeMo-RL's DTensor workers know no FP8 KV cache")
            if self.cpu_offload:
                self.model = self.move_to_cuda(self.model)
            stream = WeightStream(self.model)
            yield iter(stream)
            self.quads_fingerprint = stream.fingerprint
            if self.cpu_offload:
                self.model = self.move_to_cpu(self.model)

    return QuadsPolicyWorker
