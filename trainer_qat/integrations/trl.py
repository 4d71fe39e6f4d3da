# SPDX-License-Identifier: Apache-2.0
"""TRL: `GRPOTrainer` with a QUADS rollout.

    from trainer_qat.integrations.trl import QuadsGRPOTrainer as GRPOTrainer     # the only line that changes

    trainer = GRPOTrainer(model, reward_funcs, args=GRPOConfig(use_vllm=True, vllm_mode="colocate"), train_dataset=data)
    trainer.train()

With vllm_mode="server" the server is started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --quantization quads --logprobs-mode processed_logprobs

The policy is fake-quantized, the engine serves it in NVFP4, every sync of weights goes through `RolloutSync`
(validated, atomic, fingerprints compared), and each log line has the mismatch of trainer and rollout under `quads/`.

Written against TRL 1.16: `VLLMGeneration.sync_weights` is what the trainer calls before it generates with new weights;
`VLLMGeneration._init_vllm` starts the engine; `old_per_token_logps` and `sampling_per_token_logps` of a batch are the
two sides' log-probs of the same tokens, both at the sampling temperature.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import trl
from accelerate.utils import gather_object
from torch import Tensor
from torch import distributed as dist
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.trainer.utils import ensure_master_addr_port

from trainer_qat.integrations.gap import GapRecorder, loggable
from trainer_qat.integrations.hf import PREFIX, FollowSteps, push_metrics
from trainer_qat.prepare import QatReport, is_prepared, prepare_qat, state_of
from trainer_qat.sensitivity import sensitivities
from trainer_qat.sync import RolloutSync
from vllm_quads.nvfp4 import Contract, ContractError, MismatchError, QuadsError, first_difference
from vllm_quads.refit import HttpEngine, RefitReport

HOOKS = ("_init_vllm", "sync_weights", "generate")
if not all(callable(getattr(vllm_generation.VLLMGeneration, hook, None)) for hook in HOOKS):
    raise QuadsError(f"TRL {trl.__version__} has no VLLMGeneration with {HOOKS}; install trl 1.16")
SAMPLES = 8
"""Sequences that sensitivities are computed on: one forward and one backward pass per push."""


class QuadsGeneration(vllm_generation.VLLMGeneration):
    """TRL's generation backend with a QUADS engine, whose weights come through `RolloutSync`."""

    def __init__(
        self, *args: Any, engine_options: Mapping[str, Any], refresh_compensation: bool = False, **kwargs: Any
    ) -> None:
        """As TRL's; see `QuadsMixin` for the rest."""
        self.engine_options = dict(engine_options)
        self._refresh = refresh_compensation
        self._sampled: tuple[list[list[int]], list[list[int]]] | None = None
        self.report: RefitReport | None = None
        """What the last sync did."""
        self._pushed = False
        super().__init__(*args, **kwargs)
        self.sync = self._make_sync()
        if self._refresh and self.sync.engine is not None:
            self.sync.engine.collect_statistics()  # type: ignore[attr-defined]

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's; notes a few samples, on which sensitivities are computed at the next push."""
        output: tuple[Any, ...] = super().generate(*args, **kwargs)
        self._note_sleep()
        if self._refresh:
            pairs = [(list(p), list(c)) for p, c in zip(output[0], output[1], strict=False) if c][:SAMPLES]
            self._sampled = ([p for p, _ in pairs], [c for _, c in pairs]) if pairs else None
        return output

    def sync_weights(self) -> None:
        """Push the policy. Raises RefitError or MismatchError; the previous weights then keep serving."""
        if self.mode == "colocate" and self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if not self._pushed:  # between the construction of the trainer and now, accelerate may have sharded the model
            self.sync, self._pushed = self._make_sync(), True
        if self.sync.engine is not None or self.sync.payload.sharded:
            self.report = self.sync.push(sensitivities=self._sensitivities())
        self._require_one_policy()

    def _sensitivities(self) -> dict[str, float] | None:
        """Of the policy that is pushed, on what the previous one sampled; None before the first rollout."""
        if self._sampled is None:
            return None
        with self.accelerator.autocast():
            return sensitivities(self.accelerator.unwrap_model(self.model), *self._sampled)

    def _make_sync(self) -> RolloutSync:
        engine = None
        if self.mode == "colocate":
            engine = self.llm
        elif self.accelerator.is_main_process:
            engine = HttpEngine(self.vllm_client.base_url, **self.engine_options)
        return RolloutSync(self.model, engine)

    def _require_one_policy(self) -> None:
        """Under DDP every rank pushes its own copy of the policy into its own engine: they have to be one."""
        found = sorted({f for f in gather_object([self.report.fingerprint if self.report else None]) if f})
        if len(found) > 1:
            raise MismatchError(
                f"the ranks hold different policies (fingerprints {', '.join(found)}): their weights have diverged, so "
                f"start again from a checkpoint, with the same seed and data order on all ranks"
            )

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._connect()
        else:
            self._start()
        self.accelerator.wait_for_everyone()

    def _connect(self) -> None:
        """Find the server; weights do not travel over TRL's own NCCL group, so that is not set up."""
        if not self.accelerator.is_main_process:
            return
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.vllm_client = vllm_generation.VLLMClient(base_url=url, connection_timeout=self.server_timeout)
        require_sampled_logprobs(self.vllm_client)

    def _start(self) -> None:
        """An engine, or one rank of it, in this process, beside whatever process group there is."""
        rank, ranks = self.accelerator.process_index, self.tensor_parallel_size
        if self.accelerator.num_processes % ranks:
            raise ContractError(
                f"vllm_tensor_parallel_size: is {ranks}, which does not divide the number of processes, "
                f"{self.accelerator.num_processes}"
            )
        if ranks > 1:  # TRL gathers prompts over it
            groups = [list(range(i, i + ranks)) for i in range(0, self.accelerator.num_processes, ranks)]
            self.tp_group, _ = dist.new_subgroups_by_enumeration(groups)
        os.environ["RANK"], os.environ["LOCAL_RANK"] = str(rank), str(self.accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(self.accelerator.num_processes)
        ensure_master_addr_port()
        options: dict[str, Any] = {
            "model": _model_path(self.model, self.engine_options),
            "quantization": "quads",
            "additional_config": {"quads": state_of(self.model).contract.to_dict()},
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_sleep_mode": self.enable_sleep_mode,
            "model_impl": self.model_impl,
            "trust_remote_code": self.trust_remote_code,
            "distributed_executor_backend": "external_launcher",
            "max_num_batched_tokens": 4096,  # TRL's: vLLM's default makes its memory profiler take too much
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
            "tensor_parallel_size": ranks,
            "seed": rank // ranks,  # ranks of one engine have to sample alike
        }
        self.llm = vllm_generation.LLM(**(options | self.engine_options))
        self._llm_weights_sleeping = False
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        self._note_sleep()

    def _note_sleep(self) -> None:
        """Sleep drops the weights: from now on the engine refuses to serve until a push has brought them back."""
        if self.mode == "colocate" and self._llm_weights_sleeping:
            self.llm.collective_rpc("weight_transfer_engine", args=("before_sleep",))


class QuadsMixin:
    """Put in front of `GRPOTrainer` or a subclass of it: `class MyTrainer(QuadsMixin, GRPOTrainer)`."""

    def __init__(
        self,
        *args: Any,
        contract: Contract | None = None,
        qat_options: Mapping[str, Any] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        refresh_compensation: bool = False,
        **kwargs: Any,
    ) -> None:
        """As the trainer's, and:

        Args:
            contract: what is quantized; None takes that of a prepared model, or else the default (all routed experts).
            qat_options: further arguments of `prepare_qat`, such as {"schedule": Schedule(start=10)}.
            engine_options: further arguments of a colocated engine, vLLM's `LLM` ({"enforce_eager": True}; they win
                over TRL's), or of a server's `HttpEngine` ({"data": "ipc"}).
            refresh_compensation: let the engine gather error statistics while it generates, and choose its channel
                sets anew at each push, by them and by sensitivities on some of the last samples. A colocated engine
                that captures no CUDA graphs ({"enforce_eager": True}), and a model that is not sharded.

        Raises:
            ContractError: `use_vllm` is off, the model cannot be trained with fake quantization, or it is sharded in a
                way that hides full weights (FSDP1, DeepSpeed ZeRO, tensor parallelism).
            MismatchError: the served model follows another contract.
        """
        config = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        if config is None or not config.use_vllm:
            raise ContractError("use_vllm: is off, but QUADS is about the vLLM rollout; pass GRPOConfig(use_vllm=True)")
        if refresh_compensation and config.vllm_mode != "colocate":
            raise ContractError("refresh_compensation: a server's statistics cannot be reached from here; leave it off")
        if refresh_compensation and config.vllm_tensor_parallel_size != 1:
            raise ContractError("refresh_compensation: needs vllm_tensor_parallel_size=1; leave it off")
        config.use_vllm = False  # TRL would start an engine without QUADS; ours follows below
        try:
            super().__init__(*args, **kwargs)
        finally:
            config.use_vllm = True
        self.use_vllm = True
        _check_sharding(self)
        if refresh_compensation and self.is_fsdp_enabled:  # type: ignore[attr-defined]
            raise ContractError("refresh_compensation: sensitivities need an unsharded model; leave it off under FSDP2")
        self.qat_report = _prepare(self.model, contract, dict(qat_options or {}))  # type: ignore[attr-defined]
        self.vllm_generation = _generation(self, config, dict(engine_options or {}), refresh_compensation)
        self._last_loaded_step = -1
        self._gap = GapRecorder()
        self.add_callback(FollowSteps())  # type: ignore[attr-defined]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; on the way it notes the two sides' log-probs of this micro-batch."""
        old, sampled = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        if self.model.training and old is not None and sampled is not None:  # type: ignore[attr-defined]
            mask = inputs["completion_mask"]
            mask = mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]
            self._gap.add(*(_all_ranks(self, x) for x in (old, sampled, mask)))
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log line with the mismatch since the last one and the last push, under `quads/`."""
        report = self._gap.flush() if self.model.training else None  # type: ignore[attr-defined]
        if report is not None:
            logs.update(loggable(report.to_dict(PREFIX)))
            pushed = self.vllm_generation.report
            if pushed is not None:
                logs.update({PREFIX + key: value for key, value in push_metrics(pushed).items()})
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class QuadsGRPOTrainer(QuadsMixin, GRPOTrainer):
    """`GRPOTrainer` with a QUADS rollout; see `QuadsMixin` for the arguments that it adds."""


def _prepare(model: Any, contract: Contract | None, options: dict[str, Any]) -> QatReport | None:
    """Fake-quantize the policy, or take it as it is if it was prepared already (None)."""
    if not is_prepared(model):
        return prepare_qat(model, contract, **options)
    difference = first_difference(state_of(model).contract, contract) if contract is not None else None
    if difference is not None or options:
        raise ContractError(
            f"the model is prepared already, with other options ({difference or sorted(options)}); give them to "
            f"prepare_qat, or pass the plain model"
        )
    return None


def _check_sharding(trainer: Any) -> None:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise ContractError("FSDP1 hides weights in flat parameters: use FSDP2 (accelerate: fsdp_version: 2)")
    if trainer.is_deepspeed_enabled:
        raise ContractError("DeepSpeed's partitioned and master weights are not seen by QUADS: use FSDP2 or DDP")


def _generation(trainer: Any, config: Any, engine_options: dict[str, Any], refresh: bool) -> QuadsGeneration:
    """The backend that TRL's constructor would have made, with our class."""
    return QuadsGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        mode=config.vllm_mode,
        structured_outputs_regex=config.vllm_structured_outputs_regex,
        server_base_url=config.vllm_server_base_url,
        server_host=config.vllm_server_host,
        server_port=config.vllm_server_port,
        server_timeout=config.vllm_server_timeout,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        max_model_length=config.vllm_max_model_length,
        max_num_seqs=config.per_device_train_batch_size
        * config.vllm_tensor_parallel_size
        * config.steps_per_generation,
        enable_sleep_mode=config.vllm_enable_sleep_mode,
        model_impl=config.vllm_model_impl,
        trust_remote_code=config.trust_remote_code,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,
        generation_kwargs=config.generation_kwargs,
        engine_options=engine_options,
        refresh_compensation=refresh,
    )


def require_sampled_logprobs(client: Any) -> None:
    """Raise ContractError for a server whose log-probs are not of the distribution that it samples from."""
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ContractError(
            f"the server at {client.base_url} runs with --logprobs-mode {mode}, so at a temperature its log-probs are "
            f"not those it samples from; start it with --logprobs-mode processed_logprobs"
        )


def _model_path(model: Any, engine_options: Mapping[str, Any]) -> str:
    """The checkpoint that the engine starts from."""
    path = engine_options.get("model") or model.name_or_path
    if not path:
        raise ContractError(
            "the model was not loaded from a checkpoint, so the engine has none to start from; pass one of its shape "
            'with engine_options={"model": path}'
        )
    return str(path)


def _all_ranks(trainer: Any, x: Tensor) -> Tensor:
    """[B, T] of all ranks, right-padded with 0."""
    accelerator = trainer.accelerator
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(x, dim=1))
    return gathered
