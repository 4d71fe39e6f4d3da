# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_quads.bench.serve_worker REQUEST.json`: one engine in a process of its own, driven over pipes.

Writes one JSON object a line to stdout: {"event": "ready", ...} after the start, then an answer to each line of stdin,
{"sequences": n, "prompt": p, "output": o} -> {"event": "done", "seconds": s}. Logs go to stderr. Ends with stdin.
Other commands: {"event": "memory"}, and {"event": "experts", "sequences": ...} in an engine that returns its routing.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

LOAD_FORMAT = "quads_bench_random"


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # the pipe; whatever else prints goes to stderr
    os.dup2(2, 1)
    try:
        llm, facts = start(request)
    except Exception as e:
        _answer(answers, event="failed", error=f"{type(e).__name__}: {e}")
        raise
    _answer(answers, event="ready", **facts)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("event") == "memory":
            _answer(answers, event="memory", **memory(llm))
            continue
        outputs, seconds = generate(llm, command["sequences"], command["prompt"], command["output"])
        if command.get("event") == "experts":
            _answer(answers, event="experts", hit=experts_hit(outputs, command["prompt"]))
        else:
            _answer(answers, event="done", seconds=seconds)


def _answer(stream: TextIO, **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")


def start(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine of a request, and how long its start took."""
    begin = time.perf_counter()
    if request["weights"] == "random":
        register_random(request["form"])
    if request["arguments"].get("quantization") == "quads":
        from vllm_quads import register

        register()  # also where the package is used from a checkout, without its entry point
    from vllm import LLM

    llm = LLM(
        request["model"],
        load_format=LOAD_FORMAT if request["weights"] == "random" else "dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        **{**request["options"], **request["arguments"]},
    )
    return llm, {"start_s": round(time.perf_counter() - begin, 1)}


def register_random(form: str) -> None:
    """Make `load_format="quads_bench_random"` known to vLLM."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from vllm_quads.bench.random_weights import random_checkpoint

    class RandomLoader(BaseModelLoader):
        """Loads a random checkpoint that is generated tensor by tensor."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            loadable: Any = model
            loadable.load_weights(random_checkpoint(model_config.hf_config, form, device))

    register_model_loader(LOAD_FORMAT)(RandomLoader)


def experts_hit(outputs: list[Any], prompt: int) -> float:
    """Mean number of distinct experts that a decode step uses in a layer; all sequences are at the same position."""
    import numpy

    routed = numpy.stack([numpy.asarray(o.outputs[0].routed_experts) for o in outputs])
    decode = routed[:, prompt:].transpose(1, 2, 0, 3)  # step, layer, sequence, top-k
    rows = numpy.sort(decode.reshape(decode.shape[0] * decode.shape[1], -1), axis=1)
    return float(1 + (numpy.diff(rows, axis=1) != 0).sum(axis=1).mean())


def generate(llm: Any, sequences: int, prompt: int, output: int) -> tuple[list[Any], float]:
    """Outputs, and the seconds to sample `output` tokens after each of `sequences` prompts of `prompt` tokens."""
    from vllm import SamplingParams

    generator = random.Random(sequences)
    prompts = [
        {"prompt_token_ids": [generator.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(sequences)
    ]
    params = SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    short = [len(o.outputs[0].token_ids) for o in outputs if len(o.outputs[0].token_ids) != output]
    if short:
        raise RuntimeError(f"{len(short)} of {sequences} sequences ended early, the first after {short[0]} tokens")
    return outputs, seconds


def memory(llm: Any) -> dict[str, Any]:
    """GiB of the weights and of the KV cache, and the most that torch has reserved beside the KV cache."""
    import torch

    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {}
    cache = config.cache_config
    if cache.num_gpu_blocks:
        found["kv_cache_tokens"] = cache.num_gpu_blocks * cache.block_size
    weights = llm.collective_rpc(_weight_bytes)[0]
    if weights:
        found["weights_gib"] = weights / 2**30
    if torch.cuda.is_available():
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        found["card_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return found


def _weight_bytes(worker: Any) -> int:
    return int(getattr(worker.model_runner, "model_memory_usage", 0))


if __name__ == "__main__":
    main()
