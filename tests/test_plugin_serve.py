# SPDX-License-Identifier: Apache-2.0
"""The server: plain `vllm serve MODEL --quantization quads`, with the plugin found by its entry point alone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_helpers import PROMPTS

pytest.importorskip("vllm")


def _command() -> list[str]:
    """`vllm serve`, or the same server as a module where the CPU build lacks the metadata that `vllm` asks for."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [str(Path(sys.executable).with_name("vllm")), "serve"]


def _with_tokenizer(source: Path, target: Path) -> Path:
    """A copy of the checkpoint with a word-level tokenizer over its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(source, target)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(target)
    return target


@pytest.fixture
def server(tiny_qwen3_moe: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(address, model directory) of a server that is ready."""
    model = _with_tokenizer(tiny_qwen3_moe, tmp_path / "model")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = {"compensation": {"form": "rows"}}
    command = [
        *_command(), str(model), "--quantization", "quads", "--additional-config", json.dumps({"quads": options}),
        "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4", "--host", "127.0.0.1", "--port", str(port),
        "--num-gpu-blocks-override", "64", "--served-model-name", "tiny",
    ]  # fmt: skip
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = (tmp_path / "server.log").open("w+")
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail(f"the server did not start:\n{log.read()[-3000:]}")
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", model
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


@pytest.mark.slow
def test_served_logprobs_equal_those_of_an_in_process_engine(
    server: tuple[str, Path], engine: Callable[..., Any]
) -> None:
    """The server quantizes, routes and multiplies as the in-process engine with the same options does, to the last bit
    that HTTP carries, and it logs what it quantized."""
    from vllm import SamplingParams

    url, model = server
    body = {
        "model": "tiny", "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    choice = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]

    llm = engine(model, additional_config={"quads": {"compensation": {"form": "rows"}}}, max_num_seqs=4)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True, detokenize=False)
    (mine,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    tokens = list(mine.outputs[0].token_ids)
    assert choice["token_ids"] == tokens
    expected = [entry[t].logprob for entry, t in zip(mine.outputs[0].logprobs, tokens, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-6)
    assert "quads: 24 of" in (model.parent / "server.log").read_text()
