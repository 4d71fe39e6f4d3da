# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `Trainer` (and what is built on it): a callback that prepares, enables, pushes and logs.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[QuadsCallback(Contract(), engine=llm)])

`Trainer` and `accelerate.prepare` need nothing else: `prepare_qat(model, contract)` before or after them is enough,
because parameters, their names and the state dict stay those of the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_qat.integrations.gap import loggable
from trainer_qat.prepare import QatReport, is_prepared, prepare_qat, state_of
from trainer_qat.sync import RolloutSync
from vllm_quads.nvfp4 import Contract, ContractError
from vllm_quads.refit import RefitReport

PREFIX = "quads/"


class QuadsCallback(TrainerCallback):
    """Trains under fake quantization, and keeps a rollout engine at the policy that is being trained."""

    def __init__(
        self,
        contract: Contract | None = None,
        *,
        engine: Any = None,
        enable_at_step: int = 0,
        push_every: int = 1,
        qat_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing happens before training begins.

        Args:
            contract: what is quantized; None takes that of a prepared model, or else the default (all routed experts).
            engine: what `RolloutSync` takes, or None to push nothing. Under FSDP2 ranks without an engine pass None
                (`push_every` then has to be the same on all ranks).
            enable_at_step: optimizer steps that train on the plain weights first. The rollout is quantized all along.
            push_every: push after every so many optimizer steps; one more push opens and ends the training.
            qat_options: further arguments of `prepare_qat`, such as {"cache": "packed"}.

        Raises:
            ContractError: `enable_at_step` is negative or `push_every` not positive.
        """
        if enable_at_step < 0 or push_every < 1:
            raise ContractError(
                f"enable_at_step is {enable_at_step}, expected at least 0; push_every is {push_every}, expected at "
                f"least 1"
            )
        self.contract, self.engine = contract, engine
        self.enable_at_step, self.push_every = enable_at_step, push_every
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
        sync = RolloutSync(model, self.engine, contract=self.contract)
        self._sync = sync if self.engine is not None or sync.payload.sharded else None
        self._push(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Switch fake quantization on when its step has come."""
        state_of(model).enabled = state.global_step >= self.enable_at_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Push when it is time."""
        if state.global_step % self.push_every == 0:
            self._push(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Push what has not been pushed; the model goes on as what it was trained for, quantized."""
        state_of(model).enabled = True
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
        values: dict[str, float] = {"enabled": float(state_of(model).enabled)}
        if self.report is not None:
            values |= {
                "policy_version": self.report.policy_version,
                "push/bytes": self.report.bytes,
                "push/seconds": self.report.seconds.get("trainer_total", 0.0),
            }
        line = loggable({PREFIX + key: value for key, value in values.items()})
        if logs is not None:
            logs.update(line)
        if state.log_history:
            state.log_history[-1].update(line)

    def _push(self, state: TrainerState) -> None:
        if self._sync is not None and self._pushed_at != state.global_step:
            self.report, self._pushed_at = self._sync.push(), state.global_step
