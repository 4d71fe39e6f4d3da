# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL on a real MoE whose rollout is served in NVFP4 by QUADS; runs on a laptop CPU or on a GPU.

    tools/setup_venv.sh demo trl && source .venv/bin/activate   # vLLM, TRL and the demo's model file
    python examples/trl_grpo.py             # SmolLM2-135M as an 8-expert MoE learns to answer sums
    python examples/trl_grpo.py --naive     # the same without QUADS: BF16 trainer, plain W4A4 rollout

The lines that a GRPO script of yours needs are marked with `# QUADS`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    from datasets import Dataset
    from trl import GRPOConfig
except ImportError as e:
    sys.exit(f"{e}; install TRL beside QUADS: tools/setup_venv.sh demo trl")
import torch
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from trainer_qat import qat_disabled
from trainer_qat.integrations.trl import QuadsGRPOTrainer as GRPOTrainer  # QUADS
from vllm_quads.nvfp4 import Contract
from vllm_quads.smollm2_moe import build_smollm2_moe

COLUMNS = {
    "reward": "reward",
    "quads/sampling_logp_difference/mean": "mean gap",
    "quads/sampling_logp_difference/max": "max gap",
    "quads/k3_kl": "k3 KL",
    "quads/eff_sample_size": "ESS",
    "quads/push/seconds": "push s",
}
NAIVE = {"compensation": {"form": "none"}, "activation": {"centering": "none", "block_scale_rule": "max_to_six"}}


def sums(count: int, seed: int = 0) -> Dataset:
    """Chat prompts that ask for a sum, with the answer beside them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        question = f"What is {a} + {b}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def right_and_short(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, and up to 0.2 for saying little else."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion[0]["content"].strip()
        numbers = re.findall(r"\d+", text)
        rewards.append(float(bool(numbers) and numbers[-1] == right) + 0.2 * max(0.0, 1 - len(text) / 40))
    return rewards


class ShowGap(TrainerCallback):  # type: ignore[misc]
    """Prints a line per step, and keeps all of them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.console = Console()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called by Trainer with TRL's log line."""
        if not logs or "loss" not in logs:
            return
        self.lines.append({"step": state.global_step, **logs})
        values = "  ".join(f"{title} {logs[key]:.4f}" for key, title in COLUMNS.items() if key in logs)
        self.console.print(f"step {state.global_step}: {values}")

    def table(self) -> Table:
        """All steps."""
        table = Table("step", *COLUMNS.values())
        for line in self.lines:
            table.add_row(str(line["step"]), *(f"{line.get(key, float('nan')):.4f}" for key in COLUMNS))
        return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a MoE checkpoint (default: build SmolLM2-MoE below --out)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (%(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step, 8 answers to each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="longest answer (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-5, help="learning rate (%(default)s)")
    parser.add_argument("--naive", action="store_true", help="no QAT and no compensation, to see what QUADS removes")
    parser.add_argument("--out", type=Path, default=Path("trl-out"), help="output folder (%(default)s)")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = options.model or build_smollm2_moe(options.out / "smollm2-moe")
    contract = Contract().merged(NAIVE if options.naive else {})
    args = GRPOConfig(
        output_dir=str(options.out),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_gpu_memory_utilization=0.3,
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.prompts,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32" if cuda else "bfloat16"},
        bf16=True,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    show = ShowGap()
    trainer = GRPOTrainer(
        str(model),
        right_and_short,
        args=args,
        train_dataset=sums(8 * options.steps * options.prompts),
        callbacks=[show],
        contract=contract,  # QUADS: what is quantized and how; the default if left out
        engine_options={"enforce_eager": True} | ({} if cuda else {"num_gpu_blocks_override": 256}),  # QUADS, optional
        refresh_compensation=not options.naive,  # QUADS, optional: RAC follows the policy
    )
    trainer.remove_callback(PrinterCallback)
    with qat_disabled(trainer.model) if options.naive else contextlib.nullcontext():
        trainer.train()
    show.console.print(show.table())
    (options.out / "metrics.json").write_text(json.dumps(show.lines, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
