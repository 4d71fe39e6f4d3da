# SPDX-License-Identifier: Apache-2.0
"""The typer application: commands and exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_quads import __version__
from vllm_quads.cli.bench import app as bench
from vllm_quads.cli.doctor import doctor
from vllm_quads.cli.gap import gap
from vllm_quads.cli.inspect import inspect
from vllm_quads.cli.quantize import quantize
from vllm_quads.cli.run import EXIT_CODES

app = typer.Typer(
    name="quads",
    help="NVFP4 rollouts for RL of MoE models: make, check and measure NVFP4 checkpoints.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (quantize, inspect, gap, doctor):
    app.command(epilog=EXIT_CODES)(command)
app.add_typer(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quads {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """NVFP4 rollouts for RL of MoE models: make, check and measure NVFP4 checkpoints."""
