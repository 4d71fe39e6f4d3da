# SPDX-License-Identifier: Apache-2.0
"""`quads doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_quads.cli.run import ENVIRONMENT, FAILED, Json, print_json, reporting

if TYPE_CHECKING:
    from vllm_quads.cli.diagnosis import Diagnosis


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not start vLLM to see whether it finds the plugin.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this installation: versions, the vLLM plugin, which backend runs and why, and its bits.

    The self-check quantizes fixed data on every device and compares each byte with the reference. Exits with 3 if
    something is missing from the environment, with 1 if a device computes other bits.
    """
    with reporting(as_json):
        from vllm_quads.cli.diagnosis import diagnose

        found = diagnose(start_vllm=not quick)
        if as_json:
            print_json(found.to_dict())
        else:
            _print(found)
        if any(not c.ok and c.kind == "bits" for c in found.checks):
            raise typer.Exit(FAILED)
        if not found.ok:
            raise typer.Exit(ENVIRONMENT)


def _print(found: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for name, value in found.environment.items():
        console.print(f"{name:<20} {value}")
    console.print()
    for device in found.devices:
        console.print(f"{device.name}: backend [bold]{device.backend}[/] ({device.reason})")
    console.print()
    for check in found.checks:
        mark = "[green]ok[/]    " if check.ok else "[red]FAILED[/]"
        console.print(f"{mark} {check.name}: {check.detail}")
