# SPDX-License-Identifier: Apache-2.0
"""`quads quantize`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_quads.cli.options import parse_options
from vllm_quads.cli.run import Json, check_writable, print_json, progress, reporting

if TYPE_CHECKING:
    from vllm_quads.checkpoint import QuantizeReport
    from vllm_quads.compensation import CompensationState
    from vllm_quads.nvfp4 import Contract


class OutputFormat(str, Enum):
    """Formats that can be written."""

    QUADS = "quads"
    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


def quantize(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="BF16 checkpoint directory (Hugging Face, safetensors).")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")],
    format: Annotated[
        OutputFormat, typer.Option("--format", help="How to store it; all three can be served.")
    ] = OutputFormat.QUADS,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="KEY=VALUE",
            help="Contract option, repeatable: compensation.ratio=0.5, scheme=w4a16",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="PROMPTS.txt",
            help="One prompt per line: let the model answer them, and choose compensation and centring from that.",
        ),
    ] = None,
    calibration_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the file that are used.")] = 24,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 40,
    shard_gib: Annotated[float, typer.Option(min=0.001, max=1024, help="Largest shard; bounds the memory used.")] = 2.0,
    device: Annotated[
        str, typer.Option(help="Where to compute: cpu, cuda, or auto (cuda if there is one). The bytes are the same.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize a BF16 checkpoint to NVFP4.

    Streams one scale group at a time, reads back and verifies what it wrote, and only then puts it at DST. After an
    interruption run it again.
    """
    with reporting(as_json):
        options = parse_options(option or ())
        device = _device(device)
        from vllm_quads.checkpoint import quantize_checkpoint
        from vllm_quads.checkpoint.calibrated import missing_calibration
        from vllm_quads.checkpoint.quantize import check_quantizable
        from vllm_quads.nvfp4 import Contract

        contract = Contract().merged(options)
        compensation, input_scales = None, None
        if calibrate is not None:
            check_quantizable(src, dst, format.value, contract, overwrite=overwrite)
            check_writable("DST", dst.absolute().parent)
            sizes = {"prompts": calibration_prompts, "tokens": calibration_tokens}
            compensation, input_scales = _calibrated(src, contract, calibrate, device, **sizes)
        with progress("quantizing") as update:
            report = quantize_checkpoint(
                src,
                dst,
                format=format.value,
                contract=contract,
                compensation=compensation,
                input_scales=input_scales,
                max_shard_bytes=int(shard_gib * 2**30),
                overwrite=overwrite,
                device=device,
                progress=update,
            )
        if as_json:
            print_json({"ok": True, **report.to_dict(), "calibrated": compensation is not None})
        else:
            _print(report, missing_calibration(contract, compensation))


def _calibrated(
    src: Path, contract: Contract, prompts_file: Path, device: str, **sizes: int
) -> tuple[CompensationState, dict[str, float]]:
    """What `calibrate_checkpoint` finds, with a progress bar."""
    from vllm_quads.cli.calibration import calibrate_checkpoint

    with progress("calibrating") as update:
        return calibrate_checkpoint(src, contract, prompts_file, device=device, progress=update, **sizes)


def _print(report: QuantizeReport, missing: str | None) -> None:
    typer.echo(
        f"{report.path}: {report.quantized} weights in NVFP4, {report.kept} kept; "
        f"{report.bytes_before / 2**20:.1f} -> {report.bytes_after / 2**20:.1f} MiB in {report.seconds:.1f} s\n"
        f"format {report.format}, fingerprint {report.fingerprint}"
    )
    if missing is not None:
        typer.echo(missing)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise typer.BadParameter(f"--device: {name!r} is not cpu, cuda, cuda:N or auto")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"--device: {name} is not here, torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return name
