# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `Trainer` (and what is built on it): callbacks that prepare, count steps, push and log.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[QuadsCallback(Contract(), engine=llm)])

`Trainer` and `accelerate.prepare` need nothing else: `prepare_qat(model, contract)` before or after them is enough,
because parameters, their names and the state dict stay those of the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_qat.integrations.gap import loggable
from trainer_qat.payload import Payload
from trainer_qat.prepare import QatReport, is_prepared, prepare_qat, state_of
from trainer_qat.steps import load_qat_state_dict, qat_state_dict, qat_step
from trainer_qat.sync import RolloutSync
from vllm_quads.nvfp4 import Contract, ContractError, WeightGlobalScale
from vllm_quads.refit import RefitReport

PREFIX = "quads/"
STATE_FILE = "quads_qat.safetensors"
"""In each checkpoint that Trainer writes: optimizer steps taken, and scales that the weights alone do not tell."""
_FINGERPRINT = "quads_fingerprint"


class FollowSteps(TrainerCallback):
    """Tells a prepared model of optimizer steps (schedules and moving averages need it), also after a restart.

    A checkpoint also gets the policy's fingerprint, and a resumed run has to arrive at it: transformers' `Trainer`
    looks for fused experts under names that checkpoints do not have (it says "missing keys"), and goes on with those
    that the model held. Load the model from the checkpoint before resuming, `from_pretrained("out/checkpoint-100")`.

    Do not call `follow_optimizer` beside it: every step would count twice.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Take up what the checkpoint of a resumed run holds. Raises ContractError if the model is not that of the
        checkpoint, or its scales are lost."""
        if not state.global_step:
            return
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
        if path.is_file():
            load_qat_state_dict(model, load_file(path))
            _require_resumed(model, path)
        elif state_of(model).contract.weight_global_scale is not WeightGlobalScale.LIVE:
            raise ContractError(f"{path}: does not exist; without it a resumed run does not know its global scales")
        else:
            state_of(model).progress.move_to(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """After each optimizer step."""
        qat_step(model)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Beside the weights of a checkpoint."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        fingerprint = Payload(model).fingerprint()  # on all ranks, which may have to gather
        if state.is_world_process_zero and directory.is_dir():
            tensors = {name: tensor.cpu().contiguous() for name, tensor in qat_state_dict(model).items()}
            save_file(tensors, directory / STATE_FILE, metadata={"format": "pt", _FINGERPRINT: fingerprint})


def _require_resumed(model: Any, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        expected = (file.metadata() or {}).get(_FINGERPRINT)
    if expected is not None and expected != Payload(model).fingerprint():
        raise ContractError(
            f"the model does not hold the weights of {path.parent} after resuming: transformers' Trainer restores no "
            f"fused experts (see its warning of missing keys); load it with from_pretrained({str(path.parent)!r})"
        )


class QuadsCallback(FollowSteps):
    """Trains under fake quantization, and keeps a rollout engine at the policy that is being trained."""

    def __init__(
        self,
        contract: Contract | None = None,
        *,
        engine: Any = None,
        push_every: int = 1,
        qat_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing happens before training begins.

        Args:
            contract: what is quantized; None takes that of a prepared model, or else the default (all routed experts).
            engine: what `RolloutSync` takes, or None to push nothing. Under FSDP2 ranks without an engine pass None
                (`push_every` then has to be the same on all ranks).
            push_every: push after every so many optimizer steps; one more push opens and ends the training.
            qat_options: further arguments of `prepare_qat`, such as {"schedule": Schedule(start=10)}.

        Raises:
            ContractError: `push_every` is not positive.
        """
        if push_every < 1:
            raise ContractError(f"push_every: is {push_every}, expected at least 1")
        self.contract, self.engine, self.push_every = contract, engine, push_every
        self.qat_options = dict(qat_options or {})
        self.qat_report: QatReport | None = None
        """What `prepare_qat` did; None if the model was prepared before."""
        self.report: RefitReport | None = None
        """What the last push did."""
        self._sync: RolloutSync | None = None
        self._pushed_at = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Prepare the model if it is not yet, and push it."""
        if not is_prepared(model):
            self.qat_report = prepare_qat(model, self.contract, **self.qat_options)
        super().on_train_begin(args, state, control, model)
        sync = RolloutSync(model, self.engine, contract=self.contract)
        self._sync = sync if self.engine is not None or sync.payload.sharded else None
        self._push(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Count the step, and push when it is time."""
        super().on_step_end(args, state, control, model)
        if state.global_step % self.push_every == 0:
            self._push(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Push what has not been pushed."""
        self._push(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Add what happened to the log line: to `state.log_history`, and for the callbacks that come after this one."""
        progress = state_of(model).progress
        values: dict[str, float] = {"strength": progress.schedule.strength(progress.step)}
        if self.report is not None:
            values |= push_metrics(self.report)
        line = loggable({PREFIX + key: value for key, value in values.items()})
        if logs is not None:
            logs.update(line)
        if state.log_history:
            state.log_history[-1].update(line)

    def _push(self, state: TrainerState) -> None:
        if self._sync is not None and self._pushed_at != state.global_step:
            self.report, self._pushed_at = self._sync.push(), state.global_step


def push_metrics(report: RefitReport) -> dict[str, float]:
    """What a push did, for a logger."""
    return {
        "policy_version": report.policy_version,
        "push/bytes": report.bytes,
        "push/seconds": report.seconds.get("trainer_total", 0.0),
    }
