# SPDX-License-Identifier: Apache-2.0
"""`quads gap`."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_quads.cli.run import Json, check_writable, print_json, progress, reporting, stdout_to_stderr


class TrainerDevice(str, Enum):
    """Where the trainer's side runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Arms(str, Enum):
    """Sets of arms."""

    FULL = "full"
    QUICK = "quick"


def gap(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="BF16 checkpoint directory.")],
    arms: Annotated[Arms, typer.Option(help="Every arm, or the ten of the quickstart.")] = Arms.FULL,
    prompts: Annotated[
        Path | None, typer.Option(metavar="PROMPTS.txt", help="One prompt per line; default: those of the package.")
    ] = None,
    calibration_prompts: Annotated[int, typer.Option(min=1, help="Prompts to choose compensation on.")] = 24,
    evaluation_prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Glob of quantized weights, repeatable; default: the routed experts."),
    ] = None,
    trainer_device: Annotated[
        TrainerDevice,
        typer.Option(
            help="Where the trainer's side runs; the result names it. auto: on the GPU, if there is one with room "
            "beside the engine. BF16 is rounded differently on each, so compare results of the same devices."
        ),
    ] = TrainerDevice.AUTO,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write gap.json and gap.png there.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the trainer x rollout log-prob gap of a model, arm by arm on the same tokens.

    Runs the model in vLLM and in transformers on this machine; minutes for a small model on a CPU.
    """
    with reporting(as_json):
        if out is not None:
            check_writable("--out", out)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with stdout_to_stderr(), progress("gap") as update:
            from vllm_quads.gap import GapOptions, run_gap

            options = GapOptions(
                arms=arms.value,
                prompts=prompts,
                calibration_prompts=calibration_prompts,
                evaluation_prompts=evaluation_prompts,
                max_tokens=max_tokens,
                seed=seed,
                targets=tuple(target) if target else None,
                trainer_device=trainer_device.value,
            )
            report = run_gap(model, options, update)
            files = [str(p) for p in report.save(out)] if out is not None else []
        if as_json:
            print_json({"ok": True, **report.to_dict(), "files": files})
            return
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120).print(report.table())
        for file in files:
            typer.echo(f"written: {file}")
