# SPDX-License-Identifier: Apache-2.0
"""A vLLM server and an `AsyncLLM` for tests, and a trainer that pushes into them."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Without a size of its own vLLM profiles the memory of the card, which fails if another process allocates meanwhile.
# With one, the share of the card is only what has to be free at the start.
ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}


def trainer(path: Path, options: dict[str, Any] | None = None, device: str = "cpu") -> nn.Module:
    """The checkpoint as a model under fake quantization; options: of the contract."""
    from transformers import AutoModelForCausalLM

    from trainer_qat import prepare_qat
    from vllm_quads.nvfp4 import Contract

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    prepare_qat(model, Contract().merged(options or {}))
    return model


def train(model: nn.Module, seed: int) -> None:
    """Change every weight, as a few optimizer steps would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_((0.3 * noise * parameter.float().std().nan_to_num(0.0)).to(parameter.dtype))


def manifest(sync: Any, engine: Any, **changes: Any) -> Any:
    """What `sync` would send to `engine`, packed."""
    from vllm_quads.refit import Manifest

    payload = sync.payload
    version = engine.policy_version() + 1
    announced = Manifest(payload.contract, payload.quantized, payload.specs(), version, payload.fingerprint())
    return dataclasses.replace(announced, **changes)


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    """POST JSON, answer JSON."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


def get(url: str) -> str:
    """GET text."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


# -- vllm serve --------------------------------------------------------------------------------------------------------


def _command() -> list[str]:
    """`vllm serve`, or the same server as a module where the CPU build lacks the metadata that `vllm` asks for."""
    script = Path(sys.executable).with_name("vllm")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        script = Path()
    if script.is_file():
        return [str(script), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def with_tokenizer(source: Path, target: Path) -> Path:
    """A copy of the checkpoint with a word-level tokenizer over its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(source, target)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(target)
    return target


@contextmanager
def serving(model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """Address of a server of this model that is ready; stopped at the end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        *_command(), str(model), "--quantization", "quads", "--max-model-len", "128", "--max-num-seqs", "8",
        "--host", "127.0.0.1", "--port", str(port), "--num-gpu-blocks-override", "64", "--served-model-name", "tiny",
        *options,
    ]  # fmt: skip
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"} | environment
    with log.open("w+") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + 240
            while True:
                try:
                    get(f"http://127.0.0.1:{port}/health")
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}") from None
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def complete(url: str, prompt: list[int], tokens: int = 6) -> tuple[list[int], list[float], str]:
    """Greedy (token ids, log-probs, finish reason) of a running server."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    choice = post(f"{url}/v1/completions", body)["choices"][0]
    values = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    return choice["token_ids"], values, choice["finish_reason"]


# -- AsyncLLM ----------------------------------------------------------------------------------------------------------


class Background:
    """An event loop in a thread of its own, with an `AsyncLLM` in it."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._count = 0
        self.llm = self.run(self._start(model, options))

    @staticmethod
    async def _start(model: Path, options: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        defaults: dict[str, Any] = {
            "quantization": "quads", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128,
            "max_num_seqs": 8, "num_gpu_blocks_override": 64, "seed": 0, "disable_log_stats": True,
        }  # fmt: skip
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **(defaults | options)))

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Start a coroutine; returns its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine."""
        return self.submit(coroutine).result(240)

    async def generate(self, prompt: list[int], tokens: int = 6) -> Any:
        """Greedy `CompletionOutput` of a request."""
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
        stream = self.llm.generate({"prompt_token_ids": prompt}, params, f"request-{self._count}")
        return [output async for output in stream][-1].outputs[0]

    def scores(self, prompts: list[list[int]], tokens: int = 6) -> list[float]:
        """Log-probs of greedily decoded tokens, one request after another."""
        return [value for p in prompts for value in log_probs(self.run(self.generate(p, tokens)))]

    def stop(self) -> None:
        """Stop engine and loop."""
        self.llm.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def log_probs(completion: Any) -> list[float]:
    """Log-probs of the sampled tokens."""
    return [next(iter(entry.values())).logprob for entry in completion.logprobs]
