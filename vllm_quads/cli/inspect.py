# SPDX-License-Identifier: Apache-2.0
"""`quads inspect`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_quads.cli.run import FAILED, Json, print_json, progress, reporting

if TYPE_CHECKING:
    from vllm_quads.checkpoint import Inspection, LayerSummary


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory, quantized or BF16.")],
    every: Annotated[bool, typer.Option("--all", help="Also list the weights that are not quantized.")] = False,
    as_json: Json = False,
) -> None:
    """Read a checkpoint whole and report it: formats, scales, suspicious blocks, contract, calibration, fingerprint.

    Exits with 1 if anything is wrong: a missing, extra, truncated or misshapen tensor, a value that is NaN or Inf,
    a negative scale, or packed weights that are not those of the contract.

    In the table, 'at 448' counts the blocks whose scale is the largest that E4M3 has (one per matrix is normal), 'zero'
    those that decode to zero.
    """
    with reporting(as_json):
        from vllm_quads.checkpoint import inspect_checkpoint

        with progress("reading") as update:
            report = inspect_checkpoint(model, lambda done, total: update(done, total, ""))
        if as_json:
            print_json(report.to_dict())
        else:
            _print(report, every)
        for problem in report.problems:
            typer.echo(f"error: {problem}", err=True)
        if not report.ok:
            raise typer.Exit(FAILED)


def _where(row: LayerSummary) -> tuple[str, str]:
    """Layer number, and the rest of the name with the number of experts."""
    from vllm_quads.nvfp4.names import layer_index

    layer = layer_index(row.name)
    rest = row.name if layer is None else row.name.partition(f"layers.{layer}.")[2]
    return ("" if layer is None else str(layer)), rest.replace(".experts.*.", f".experts[{row.matrices}].")


def _print(report: Inspection, every: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.path} ({report.format}, {report.total_bytes / 2**20:.1f} MiB)")
    table.add_column("layer", justify="right")
    table.add_column("weights", no_wrap=True)
    for name in ("bits", "global scale", "blocks", "at 448", "zero"):
        table.add_column(name, justify="right")
    for row in report.layers:
        if row.format != "nvfp4":
            if every:
                table.add_row(*_where(row), f"{row.bits_per_weight:.0f}", "", "", "", "")
            continue
        low, high = row.decode_scale_min or 0.0, row.decode_scale_max or 0.0
        scale = f"{low:.1e}" if low == high else f"{low:.1e}..{high:.1e}"
        counts = (row.blocks, row.saturated_blocks, row.zero_blocks)
        table.add_row(*_where(row), f"{row.bits_per_weight:.2f}", scale, *(f"{c:,}" for c in counts))
    console = Console(width=None if sys.stdout.isatty() else 110)
    if table.row_count:
        console.print(table)
    kept = [r for r in report.layers if r.format != "nvfp4"]
    console.print(
        f"not quantized: {sum(r.matrices for r in kept)} matrices, {sum(r.parameters for r in kept):,} parameters"
    )
    if report.contract is not None:
        options = {k: v for k, v in report.contract.items() if k not in ("quant_method", "version")}
        for key, value in options.items():
            console.print(f"contract {key}: {value}", highlight=False, soft_wrap=True)
    if report.compensation is not None:
        c = report.compensation
        console.print(
            f"compensation: {c['sites']} sites, {c['selected_blocks']:,} of {c['blocks']:,} blocks selected, "
            f"{c['centred_sites']} centred, fingerprint {c['fingerprint']}"
        )
    if report.calibration is not None:
        console.print(report.calibration, highlight=False, soft_wrap=True)
    console.print(f"fingerprint: {report.fingerprint or 'none'}", highlight=False)
    console.print("[bold red]broken[/]" if report.problems else "[bold green]ok[/]")
