# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.engine`: output tokens per second of whole vLLM engines, QUADS against BF16 and FP8.

A 48-layer Qwen3-30B-A3B with random weights, uniformly random routing, 64 tokens in and 256 out, CUDA graphs on. One
subprocess per engine, one after the other on the same card. Needs an NVIDIA GPU and vLLM.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "quads": {"quantization": "quads"},
    "quads-plain": {
        "quantization": "quads",
        "additional_config": {
            "quads": {
                "activation": {"block_scale_rule": "max_to_six", "centering": "none"},
                "compensation": {"form": "none"},
            }
        },
    },
}
"""Engine arguments. `quads` is the default contract (RAC, centring, four-over-six), `quads-plain` naive W4A4."""
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def write_config(directory: Path, layers: int) -> None:
    """A checkpoint directory with a config and no weights."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**(QWEN3_30B_A3B | {"num_hidden_layers": layers}), dtype="bfloat16")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)


def measure(name: str, model: Path, sequences: list[int], prompt: int, output: int) -> dict[str, Any]:
    """Run one engine in this process: output tokens/s by number of sequences, and the memory its weights take."""
    import random

    import torch
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(sequences),
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        **ENGINES[name],
    )
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 1), "tokens_per_s": {}}
    generator = random.Random(0)
    for count in sequences:
        prompts = [
            {"prompt_token_ids": [generator.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(count)
        ]
        times = []
        for repeat in range(3):  # the first warms up
            tokens = 16 if repeat == 0 else output
            params = SamplingParams(temperature=1.0, seed=None, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        result["tokens_per_s"][count] = round(count * output / min(times[1:]), 1)
        print(f"{name}: {count} sequences, {result['tokens_per_s'][count]} tokens/s", file=sys.stderr, flush=True)
    result["device"] = torch.cuda.get_device_name()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="bf16,fp8,quads", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--sequences", default="16,64,256", help="numbers of concurrent sequences (%(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="decoder layers (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens (%(default)s)")
    parser.add_argument("--output", type=int, default=256, help="output tokens (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sequences = [int(s) for s in args.sequences.split(",")]
    if args.worker:
        print(json.dumps(measure(args.worker, args.model, sequences, args.prompt, args.output)))
        return
    environment = os.environ | {
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), args.layers)
        for name in args.engines.split(","):
            command = [sys.executable, "-m", "benchmarks.engine", "--worker", name, "--model", directory]
            command += ["--sequences", args.sequences, "--prompt", str(args.prompt), "--output", str(args.output)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                results[name] = {"error": f"exit code {done.returncode}"}
            else:
                results[name] = json.loads(lines[-1])
            if args.out:  # what was measured survives a later failure
                args.out.write_text(json.dumps(_report(args, results), indent=2) + "\n")
    print(json.dumps(_report(args, results), indent=2))


def _report(args: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    import importlib.metadata

    import torch

    versions = {"torch": torch.__version__}
    for name in ("vllm", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    settings = {k: v for k, v in vars(args).items() if k in ("sequences", "layers", "prompt", "output")}
    return {"date": datetime.date.today().isoformat(), "versions": versions, "settings": settings, "engines": results}


if __name__ == "__main__":
    main()
