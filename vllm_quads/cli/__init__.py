# SPDX-License-Identifier: Apache-2.0
"""The `quads` command. Each command has its own file and imports what is heavy only when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `quads` script."""
    from vllm_quads.cli.app import app

    app()
