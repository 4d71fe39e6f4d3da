# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer and accelerate: a prepared model trains, is sharded, saved and resumed like the plain one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from torch import multiprocessing as mp
from torch import nn
from trainer_models import ALL_LINEARS, qwen3, single_thread, tokens  # noqa: F401
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from trainer_qat import RolloutSync, Schedule, prepare_qat, qat_state_dict
from trainer_qat.prepare import is_prepared
from vllm_quads.nvfp4 import Contract, ContractError

pytest.importorskip("accelerate", reason="accelerate is not installed")

from trainer_qat.integrations.hf import STATE_FILE, QuadsCallback

STEPS, LR = 4, 0.3


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Fixed rows of tokens."""

    def __init__(self) -> None:
        self.rows = tokens(rows=4 * STEPS, columns=12, seed=5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(model: nn.Module, directory: Path, callbacks: list[Any] | None = None, **options: Any) -> Trainer:
    """A Trainer with SGD at a constant rate over the rows in order, four a step."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Trainer(
        model,
        TrainingArguments(output_dir=str(directory), **(defaults | options)),
        train_dataset=Rows(),
        optimizers=(optimizer, schedule),
        callbacks=callbacks,
    )


def losses(trained: Trainer) -> list[float]:
    """Loss of each step."""
    return [line["loss"] for line in trained.state.log_history if "loss" in line]


def plain_loop(model: nn.Module, autocast: bool = False) -> list[float]:
    """The same optimizer steps without Trainer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    found = []
    for step in range(STEPS):
        rows = Rows().rows[4 * step : 4 * step + 4]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names and the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("mode", ["BF16", "FP32 masters, autocast, checkpointing"])
def test_trainer_gives_the_losses_and_weights_of_a_plain_loop(mode: str, tmp_path: Path) -> None:
    """With BF16 weights, and with FP32 masters under autocast and gradient checkpointing: bit for bit."""
    mixed = mode.startswith("FP32")
    dtype = torch.float32 if mixed else torch.bfloat16
    model, reference = qwen3(dtype=dtype), qwen3(dtype=dtype)
    for m in (model, reference):
        prepare_qat(m, ALL_LINEARS)
    options = {"bf16": True, "gradient_checkpointing": True} if mixed else {}
    trained = trainer(model, tmp_path, **options)
    trained.train()
    expected = plain_loop(reference, autocast=mixed)
    assert losses(trained) == pytest.approx(expected, abs=1e-4)  # Trainer rounds what it logs
    assert equal(weights(model), weights(reference))
    assert expected[0] != pytest.approx(plain_loop(qwen3(dtype=dtype), autocast=mixed)[0], abs=1e-4)


def test_a_saved_model_loads_without_quads_and_a_run_resumes(tmp_path: Path) -> None:
    """Stopped after two steps and resumed, a run ends with the weights of one that was not; what is saved is plain."""
    whole = qwen3()
    prepare_qat(whole)
    straight = trainer(whole, tmp_path / "a", save_strategy="steps", save_steps=2)
    straight.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4", dtype=torch.bfloat16)
    assert not is_prepared(saved)
    assert equal(weights(saved), weights(whole))
    assert "quads" not in (tmp_path / "a" / "checkpoint-4" / "config.json").read_text()
    # Trainer itself restores no fused experts: it looks for them under the names that they have in memory.
    stopped = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2", dtype=torch.bfloat16)
    resumed = qwen3()
    resumed.load_state_dict(stopped.state_dict())
    prepare_qat(resumed)
    again = trainer(resumed, tmp_path / "a")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert again.state.global_step == STEPS
    assert equal(weights(resumed), weights(whole))


def test_callback_prepares_schedules_pushes_and_logs(tmp_path: Path) -> None:
    """Plain steps until the schedule starts, the engine at the policy's bytes after each push, and all of it logged."""
    model = qwen3()
    contract = Contract()
    shape = qwen3()
    engine = FakeEngine(contract, prepare_qat(shape, contract).quantized)
    options = {"schedule": Schedule(start=2)}
    callback = QuadsCallback(contract, engine=engine, push_every=2, qat_options=options)
    trained = trainer(model, tmp_path, callbacks=[callback])
    trained.train()
    plain = plain_loop(qwen3())
    assert losses(trained)[:2] == pytest.approx(plain[:2], abs=1e-4)
    assert losses(trained)[2] != pytest.approx(plain[2], abs=1e-4)
    assert engine.calls == ["begin", "load", "commit"] * 3  # before the first, after the second and the fourth step
    assert engine.fingerprint() == RolloutSync(model, None).payload.fingerprint() == callback.report.fingerprint
    lines = [line for line in trained.state.log_history if "loss" in line]
    assert [line["quads/strength"] for line in lines] == [0, 1, 1, 1]  # of the next step, as is the learning rate
    assert [line["quads/policy_version"] for line in lines] == [1, 2, 2, 3]
    assert callback.qat_report is not None
    with pytest.raises(ContractError, match="push_every: is 0"):
        QuadsCallback(push_every=0)


def test_moving_average_scales_survive_a_restart(tmp_path: Path) -> None:
    """What the weights alone do not tell is in the checkpoint, and a resumed run needs it; nor does it go on with
    experts other than those of the checkpoint, which Trainer does not restore."""
    contract = Contract().merged({"weight_global_scale": "moving_average"})
    options = {"scale_decay": 0.5}
    whole = qwen3()
    straight = trainer(
        whole, tmp_path, [QuadsCallback(contract, qat_options=options)], save_strategy="steps", save_steps=2
    )
    straight.train()
    stopped = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.bfloat16)
    resumed = qwen3()
    resumed.load_state_dict(stopped.state_dict())
    again = trainer(resumed, tmp_path, [QuadsCallback(contract, qat_options=options)])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(weights(resumed), weights(whole))
    assert equal(qat_state_dict(resumed), qat_state_dict(whole))
    other = trainer(qwen3(), tmp_path, [QuadsCallback(contract, qat_options=options)])
    with pytest.raises(ContractError, match="fused experts.*from_pretrained"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / STATE_FILE).unlink()
    lost = trainer(qwen3(), tmp_path, [QuadsCallback(contract, qat_options=options)])
    with pytest.raises(ContractError, match="does not know its global scales"):
        lost.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# --- two ranks -------------------------------------------------------------------------------------------------------


def worker(rank: int, port: int, directory: str) -> None:
    """One rank trains on half of every batch through accelerate; losses are averaged over ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "1"}
    torch.set_num_threads(1)
    from accelerate import Accelerator

    results: dict[str, Any] = {}
    if rank == 0:
        alone = qwen3(dtype=torch.float32)
        prepare_qat(alone)
        results["one process"] = plain_loop(alone)
    accelerator = Accelerator(cpu=True)
    model = qwen3(dtype=torch.float32)
    prepare_qat(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    model.train()
    found = []
    for step in range(STEPS):
        rows = Rows().rows[4 * step : 4 * step + 4][2 * rank : 2 * rank + 2]
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(accelerator.reduce(loss.detach(), "mean")))
    results["ddp"] = (found, RolloutSync(model, None).payload.fingerprint(), type(model).__name__)
    torch.save(results, f"{directory}/rank{rank}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def test_accelerate_on_two_ranks_trains_like_one_process(tmp_path: Path) -> None:
    """accelerate.prepare with DDP: both ranks end with the same bytes, and have had the losses of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(worker, args=(port, str(tmp_path)), nprocs=2, start_method="spawn")
    first, second = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert first["ddp"] == second["ddp"]
    found, _, kind = first["ddp"]
    assert kind == "DistributedDataParallel"
    assert found == pytest.approx(first["one process"], abs=2e-5)
