# SPDX-License-Identifier: Apache-2.0
"""Refits between two GPUs of one machine: seconds, bytes, and proof that both sides hold the same weights.

    python benchmarks/refit_two_gpus.py nccl       # trainer on GPU 0, server on GPU 1, tensors by NCCL
    python benchmarks/refit_two_gpus.py ipc        # trainer on GPU 0, tensor-parallel server on both, CUDA IPC
    torchrun --nproc-per-node 2 benchmarks/refit_two_gpus.py nccl ipc     # the second with an FSDP2 trainer on both
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_PROTO=LL,Simple python benchmarks/refit_two_gpus.py nccl-tp   # trainer on GPU
        # 0, tensor-parallel server on both, by NCCL: trainer and a worker share a GPU, which needs NCCL 2.30
    torchrun --nproc-per-node 2 benchmarks/refit_two_gpus.py launcher   # FSDP2 trainer and tensor-parallel engine in
        # the same two processes, then one trainer process to both by NCCL; with one GPU both processes share it, which
        # also needs NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1 (see `refit_launcher`)

The model has the layer shapes of Qwen3-30B-A3B with random weights and fewer layers (`--layers`). The server starts
with dummy weights. Policies A, B and A again are pushed, packed and as BF16; the trainer's fingerprint is over whole
tensors, so that an equal one from a tensor-parallel server means the bytes of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from trainer_qat import RolloutSync, prepare_qat
from vllm_quads.bench import environment
from vllm_quads.nvfp4 import Contract
from vllm_quads.refit import HttpEngine

PROMPTS = [[1, 2, 3, 4, 5], list(range(100, 160)), [7]]


def config(layers: int, small: bool = False) -> Any:
    """Qwen3-30B-A3B with fewer layers and a small vocabulary; small: also with matrices that suit a CPU."""
    import transformers

    hidden, inter, experts = (256, 64, 8) if small else (2048, 768, 128)
    return transformers.Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inter, intermediate_size=6144, num_experts=experts,
        num_experts_per_tok=8,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=8192,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, max_position_embeddings=4096,
        norm_topk_prob=True, dtype=torch.bfloat16,
    )  # fmt: skip


def save_tokenizer(directory: Path) -> None:
    """A word-level tokenizer, without which the server does not start."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)


def build(layers: int, device: torch.device, shard: bool, small: bool = False) -> Any:
    """The trainer's model, the same on every rank; under FSDP2 if `shard`."""
    import transformers

    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config(layers, small), dtype=torch.bfloat16)
    prepare_qat(model, Contract())
    if shard:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def local_weights(model: Any) -> list[torch.Tensor]:
    """This rank's part of every parameter."""
    return [p.data.to_local() if hasattr(p, "to_local") else p.data for p in model.parameters()]


@torch.no_grad()
def step(model: Any) -> None:
    """Change every weight."""
    torch.manual_seed(1)
    for weight in local_weights(model):
        weight.mul_(1 + 0.3 * torch.rand_like(weight))


def say(*words: Any) -> None:
    """A line of progress with the time since the start."""
    print(f"{time.perf_counter() - BEGIN:6.1f} s", *words, file=sys.stderr, flush=True)


BEGIN = time.perf_counter()


@contextmanager
def serve(directory: Path, logs: Path, name: str, devices: str, options: list[str]) -> Iterator[Callable[[], str]]:
    """A server with dummy weights on the given GPUs; what is yielded waits for it and returns its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory),
        "--quantization", "quads",
        "--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "16",
        "--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", str(1 << 30), "--max-num-batched-tokens", "1024",
        "--num-gpu-blocks-override", "256", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
        "--enforce-eager", "--no-enable-prefix-caching",  # a question that is asked again is computed in the same steps
        *options,
    ]  # fmt: skip
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # torchrun's variables belong to the trainer: a server that sees them waits for a store that is not its own
    env = {
        k: v for k, v in os.environ.items() if k not in ours and not k.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
    env |= {"CUDA_VISIBLE_DEVICES": devices, "VLLM_SERVER_DEV_MODE": "1"}
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # which is compiled at the first start
    log = logs / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

        def ready() -> str:
            deadline = time.monotonic() + 300
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    return f"http://127.0.0.1:{port}"
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the server did not start, see {log.name}") from None
                    time.sleep(0.3)

        try:
            yield ready
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> list[list[float]]:
    """Greedy log-probs, which are equal if and only if the weights are."""
    out = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        choice = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]
        out.append([*map(float, choice["token_ids"]), *choice["logprobs"]["token_logprobs"]])
    return out


@torch.no_grad()
def measure(model: Any, engine: Any, answers: Callable[[], Any]) -> dict[str, Any]:
    """Push A, B, B as BF16, A; check each; the reports of all. engine: None on ranks without one."""
    sync = RolloutSync(model, engine)
    result: dict[str, Any] = {}
    first: Any = None
    changed: Any = None
    kept = [w.clone() for w in local_weights(model)]
    for name, packed in (("A", True), ("B", True), ("B bf16", False), ("A again", True)):
        if name == "B":
            step(model)
        elif name == "A again":
            for weight, old in zip(local_weights(model), kept, strict=True):
                weight.copy_(old)
        report = sync.push(packed=packed)
        if engine is None:
            continue
        seconds = {k: round(v, 4) for k, v in report.seconds.items()}
        result[name] = {"seconds": seconds, "GB": round(report.bytes / 1e9, 3), "fingerprint": report.fingerprint}
        assert report.verified, "the report does not say that digests were compared"
        assert engine.fingerprint() == report.fingerprint
        say(name, report.fingerprint, seconds)
        scores = answers()
        repeats = differing(answers(), scores)
        assert not repeats, f"{name}: the same weights answer twice in two ways, so nothing can be compared: {repeats}"
        if name == "A":
            first = scores
        elif name == "B":
            changed = scores
            assert changed != first, "the answers did not change"
        else:
            difference = differing(scores, changed if name == "B bf16" else first)
            result[name]["answers"] = difference or "equal"
            say(name, "answers:", result[name]["answers"])
    if engine is not None:
        assert result["A"]["fingerprint"] == result["A again"]["fingerprint"] != result["B"]["fingerprint"]
        assert result["B"]["fingerprint"] == result["B bf16"]["fingerprint"]
        others = {name: r["answers"] for name, r in result.items() if r.get("answers", "equal") != "equal"}
        assert not others, f"other answers than after the first push: {others}"
    return result


def differing(scores: list[list[float]], expected: list[list[float]]) -> str:
    """How answers differ; empty if they do not."""
    pairs = [(a, b) for mine, other in zip(scores, expected, strict=True) for a, b in zip(mine, other, strict=True)]
    apart = [abs(a - b) for a, b in pairs if a != b]
    return f"{len(apart)} of {len(pairs)} numbers, by up to {max(apart):.3g}" if apart else ""


def prepare(directory: Path, layers: int, small: bool = False) -> None:
    """What a server with dummy weights needs: config and tokenizer."""
    config(layers, small).save_pretrained(directory)
    data = json.loads((directory / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(data))
    save_tokenizer(directory)


def surroundings(layers: int) -> dict[str, Any]:
    """What ran."""
    from vllm import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"vllm": __version__, "transformers": metadata.version("transformers")}
    return {"gpu": gpu, "torch": torch.__version__, "layers": layers, "versions": versions}


PARALLEL = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "--disable-custom-all-reduce"]


def lead(cases: list[str], layers: int, sharded: bool, logs: Path | None, file: Path | None) -> dict[str, Any]:
    """Rank 0: start all servers at once, then run the cases one after another, writing the results after each."""
    results = surroundings(layers)
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(temporary)
        logs = directory if logs is None else logs
        prepare(directory, layers)
        starting = {
            case: stack.enter_context(
                serve(directory, logs, case, "1" if case == "nccl" else "0,1", [] if case == "nccl" else PARALLEL)
            )
            for case in cases
        }
        try:
            for case in cases:
                fsdp = sharded and case == "ipc"
                if fsdp:
                    dist.init_process_group("nccl", device_id=device)
                model = build(layers, device, shard=fsdp)
                say("model built")
                url = starting[case]()
                say("server ready")
                name = f"{case}, FSDP2" if fsdp else case
                engine = HttpEngine(url, "ipc" if case == "ipc" else "nccl")
                results[name] = measure(model, engine, partial(answers, url))
                say(name, json.dumps(results[name]))
                if file is not None:
                    file.write_text(json.dumps(results, indent=1) + "\n")
                del model
        except BaseException:
            for log in logs.glob("*.log"):
                print(f"--- {log.name}", log.read_text()[-4000:], file=sys.stderr)
            raise
    return results


def launched(arguments: argparse.Namespace) -> None:
    """The case `launcher`; rank 0 prints what is there after each of its parts."""
    import refit_launcher

    results = surroundings(arguments.layers)
    results |= {"ranks": 2, "GPUs": torch.cuda.device_count()}
    results |= {name: getattr(arguments, name) for name in ("expert_parallel", "graphs")}

    def write(part: Mapping[str, Any]) -> None:
        results.update(part)
        text = json.dumps(results, indent=1)
        print(text, flush=True)
        if arguments.json is not None:
            arguments.json.write_text(text + "\n")

    refit_launcher.run(arguments, write)
    if torch.cuda.is_available():
        os._exit(0)  # processes that share a GPU may wait for each other for ever when NCCL is taken down


def main() -> None:
    """Run the cases and print their results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=("nccl", "nccl-tp", "ipc", "launcher"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep-logs", type=Path, help="directory for the servers' logs, which are lost otherwise")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--expert-parallel", action="store_true", help="launcher: whole experts on each rank")
    parser.add_argument("--graphs", action="store_true", help="launcher: capture CUDA graphs for decoding")
    parser.add_argument("--small", action="store_true", help="launcher: a model that suits a CPU, to try the script")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "launcher" in arguments.cases:
        if arguments.cases != ["launcher"] or ranks != 2:
            sys.exit("the case `launcher` runs alone, under torchrun --nproc-per-node 2")
        launched(arguments)
        return
    environment.require_or_exit(hopper=False, gpus=2)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if rank == 0:
        results = lead(arguments.cases, arguments.layers, ranks > 1, arguments.keep_logs, arguments.json)
        print(json.dumps(results, indent=1))
    elif "ipc" in arguments.cases:
        dist.init_process_group("nccl", device_id=device)  # waits for the first rank
        measure(build(arguments.layers, device, shard=True), None, list)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
