# SPDX-License-Identifier: Apache-2.0
"""What every command shares: exit codes, errors as one line, JSON on a clean stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

OK, FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = (
    "Exit codes: 0 success; 1 a broken checkpoint, a bad contract or a failed check; 2 wrong usage; "
    "3 something is missing from the environment; 130 interrupted."
)
_ADVICE = {
    "transformers": "pip install 'vllm-quads[trainer]'",
    "matplotlib": "pip install 'vllm-quads[trainer]'",
    "vllm": "pip install 'vllm-quads[cuda]' (NVIDIA GPU) or 'vllm-quads[cpu]'",
}
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn the errors that users can meet into one line on stderr (and a JSON object with --json), and an exit code."""
    from vllm_quads.nvfp4.errors import QuadsError

    warnings.showwarning = _show_warning
    try:
        yield
    except typer.BadParameter as e:  # click prints it, with the usage
        if as_json:
            print_json({"ok": False, "error": {"type": "UsageError", "message": e.message}})
        raise
    except QuadsError as e:
        _fail(e, getattr(e, "exit_code", FAILED), as_json)
    except ModuleNotFoundError as e:
        advice = _ADVICE.get(e.name or "", "install it")
        _fail(e, ENVIRONMENT, as_json, f"the Python package {e.name!r} is not installed: {advice}")
    except OSError as e:
        name = f"{e.filename}: " if e.filename else ""
        _fail(e, FAILED, as_json, f"{name}{e.strerror or e}")
    except KeyboardInterrupt as e:
        _fail(e, INTERRUPTED, as_json, "interrupted")


def _fail(error: BaseException, code: int, as_json: bool, message: str | None = None) -> None:
    text = " ".join((message or str(error)).split())
    typer.echo(f"error: {text}", err=True)
    if as_json:
        print_json({"ok": False, "error": {"type": type(error).__name__, "message": text}})
    raise typer.Exit(code) from error


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning) and "vllm_quads" in filename:
        typer.echo(f"warning: {message}", err=True)


def check_writable(option: str, folder: Path) -> None:
    """That a folder can be made and written to: asked before minutes of work, not after."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions alone do not tell, least of all a superuser
            pass
    except OSError as e:
        message = f"{option}: {there} is not a directory that can be written to ({e.strerror})"
        raise typer.BadParameter(message) from e


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr; yields a callback (done, total, what is being done)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    plain = _PlainProgress(label)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(label, total=None)

        def update(done: int, total: int, what: str = "") -> None:
            if console.is_terminal:
                bars.update(task, completed=done, total=total, description=f"{label} {what}".strip()[:72])
            else:
                plain(done, total, what)

        yield update


class _PlainProgress:
    """Where stderr is no terminal (a job's log): a line per tenth, and one where the last is 15 s old."""

    def __init__(self, label: str) -> None:
        self._label, self._tenth, self._last = label, -1, -math.inf

    def __call__(self, done: int, total: int, what: str) -> None:
        tenth, now = 10 * done // max(total, 1), time.monotonic()
        if tenth > self._tenth or now - self._last >= 15:
            self._tenth, self._last = max(tenth, self._tenth), now
            typer.echo(f"{self._label}: {100 * done // max(total, 1)} % {what}".rstrip(), err=True)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print (vLLM logs to stdout) to stderr, below Python too, so that stdout stays ours."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
