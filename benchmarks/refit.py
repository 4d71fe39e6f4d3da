# SPDX-License-Identifier: Apache-2.0
"""Refits of a Qwen3-30B-A3B shape on one GPU: `python benchmarks/refit.py quads|bf16|fp8 [--layers N] [--out DIR]`.

`quads`: a trainer's model and an engine with captured CUDA graphs in one process; the experts' install alone, then
pushes of packed and of BF16 weights, with and without an undo log, after which the fingerprint is recomputed from what
serves. `--profile`: where the time of one packed push goes. `bf16` and `fp8`: vLLM's own layerwise reload of the same
model from tensors on the GPU (FP8: quantized online). Weights are random. The time of copying the same bytes once is
measured in the same process: the floor. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import cProfile
import faulthandler
import io
import json
import os
import pstats
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import torch

from vllm_quads.bench import environment
from vllm_quads.bench.engines import ENGINES, QWEN3_30B_A3B, write_model

START = time.perf_counter()
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 16]}


def say(**facts: Any) -> None:
    """One line of JSON, and into the file of --out."""
    facts["at"] = time.perf_counter() - START
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in facts.items()})
    print(line, flush=True)
    if say.file is not None:  # type: ignore[attr-defined]
        with say.file.open("a") as f:  # type: ignore[attr-defined]
            f.write(line + "\n")


say.file = None  # type: ignore[attr-defined]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds until it returns, which may be before the device is done."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_bandwidth() -> float:
    """Bytes per second at which one buffer of 1 GiB is copied to another (each byte counted once)."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    b.copy_(a)
    _, seconds = timed(lambda: [b.copy_(a) for _ in range(20)])
    return 20 * a.numel() / seconds


def engine(kind: str, layers: int, directory: Path, memory: float) -> Any:
    """A vLLM engine with dummy weights and captured CUDA graphs."""
    from vllm import LLM

    chosen = ENGINES[kind]
    return LLM(
        str(write_model(directory / kind, chosen, layers)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        gpu_memory_utilization=memory,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=False,
        compilation_config=GRAPHS,
        **chosen.arguments,
    )


def trainer(layers: int) -> Any:
    """The Hugging Face model with random weights, on the GPU, prepared."""
    import transformers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trainer_qat import prepare_qat

    config = Qwen3MoeConfig(**(QWEN3_30B_A3B | {"num_hidden_layers": layers}))
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").requires_grad_(False)
    fill(model, seed=0)
    say(event="trainer", transformers=transformers.__version__, gib=torch.cuda.memory_allocated() / 2**30)
    prepare_qat(model)
    return model.eval()


@torch.no_grad()
def fill(model: Any, seed: int) -> None:
    """Random weights."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for p in model.parameters():
        p.normal_(std=0.02, generator=generator) if p.dim() > 1 else p.fill_(1.0)
    for b in model.buffers():
        b.fill_(1.0)


def quads(options: argparse.Namespace, directory: Path) -> None:
    """Pushes into a QUADS engine."""
    from trainer_qat import RolloutSync
    from vllm_quads import register
    from vllm_quads.refit import as_engine

    register()
    layers, repeats = options.layers, options.repeats
    llm, seconds = timed(lambda: engine("quads", layers, directory, 0.5))
    say(event="engine", kind="quads", start=seconds, gib=torch.cuda.memory_allocated() / 2**30)
    model = trainer(layers)
    generate(llm)
    rollout = as_engine(llm)
    bandwidth = copy_bandwidth()
    sync = RolloutSync(model, llm)
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    packed_bytes = int(experts * 0.28125)
    say(event="floor", copy_gbs=bandwidth / 1e9, bf16=experts / bandwidth, packed=packed_bytes / bandwidth)
    install_only(llm, sync, bandwidth, experts, packed_bytes)
    for packed in (True, False):
        pushes(sync, packed, "none", repeats)
    pushes(sync, True, "none", repeats, verify=False)
    if options.profile:
        profile(lambda: sync.push(rollback="none"))
    pushes(sync, True, "host", repeats)
    served, seconds = timed(rollout.fingerprint)
    report = rollout.status().report
    assert report is not None
    assert served == report.fingerprint, "what serves is not what was pushed"
    say(event="fingerprint", seconds=seconds, equal=True)
    check(llm, model, sync, options.loaders)
    say(event="done", **vars(rollout.status().counters))


def pushes(sync: Any, packed: bool, rollback: str, repeats: int, verify: bool = True) -> None:
    """End-to-end pushes, the trainer's quantization included."""
    for i in range(repeats):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        report, seconds = timed(lambda: sync.push(packed=packed, rollback=rollback, verify=verify))
        peak = torch.cuda.max_memory_allocated() - before
        say(event="push", packed=packed, rollback=rollback, verified=verify, repeat=i, push=seconds,
            peak_gib=peak / 2**30, tensors=report.tensors, gb=report.bytes / 1e9, **dict(report.seconds))  # fmt: skip


def profile(work: Callable[[], Any]) -> None:
    """Where the time of one push goes: functions of the host, then operators and kernels (25 each)."""
    profiler = cProfile.Profile()
    timed(lambda: profiler.runcall(work))
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(25)
        print("\n".join(line for line in text.getvalue().splitlines() if line.strip()), flush=True)
    with torch.profiler.profile() as trace:
        timed(work)
    averages = trace.key_averages()
    for order in ("self_cpu_time_total", "self_cuda_time_total"):
        print(averages.table(sort_by=order, row_limit=25, max_name_column_width=60), flush=True)


def check(llm: Any, model: Any, sync: Any, loaders: bool) -> None:
    """Failures, and a comparison with vLLM's own loaders, through the captured graphs. Raises AssertionError."""
    from vllm_quads.nvfp4 import RefitError
    from vllm_quads.refit import as_engine

    rollout: Any = as_engine(llm)
    first, fingerprint = generate(llm), rollout.fingerprint()
    load = type(rollout).load

    def dying(self: Any, tensors: Iterator[Any]) -> None:
        def half() -> Iterator[Any]:
            for i, item in enumerate(tensors):
                if i == 300:
                    raise OSError("the trainer has died")
                yield item

        load(self, half())

    fill(model, seed=1)
    for rollback in ("host", "none"):
        type(rollout).load = dying
        try:
            sync.push(rollback=rollback)
        except RefitError as e:
            say(event="failure", rollback=rollback, message=str(e)[-160:])
        finally:
            type(rollout).load = load
        if rollback == "host":
            assert generate(llm) == first, "a rolled-back engine gives other log-probs"
            assert rollout.fingerprint() == fingerprint
            continue
        try:
            generate(llm)
        except RefitError as e:
            say(event="refusal", message=str(e)[:160])
        else:
            raise AssertionError("an engine without weights has answered")
    sync.push(rollback="none")
    second = generate(llm)
    assert second != first
    damaged_pushes(llm, model, sync)
    assert generate(llm) == second, "a push of damaged weights has changed what serves"
    fill(model, seed=0)
    sync.push(rollback="none")
    assert generate(llm) == first, "a push of the same weights gives other log-probs"
    assert rollout.fingerprint() == fingerprint
    if not loaders:
        return
    stacks = [(n, t.detach()) for n, t in sync.payload.model.named_parameters()]
    _, seconds = timed(lambda: llm.apply_model(lambda served: served.load_weights(iter(stacks))))
    assert generate(llm) == first, "vLLM's loaders and a push give other log-probs"
    assert rollout.fingerprint() == fingerprint
    say(event="loaders", seconds=seconds, equal=True)


@torch.no_grad()
def damaged_pushes(llm: Any, model: Any, sync: Any) -> None:
    """A NaN in a weight of either kind, and a negative block scale in a late layer, are refused by name."""
    from trainer_qat.push_stream import PushStream
    from vllm_quads.nvfp4 import QuadsError
    from vllm_quads.refit import Manifest, as_engine

    rollout, payload = as_engine(llm), sync.payload

    def with_nan(name: str) -> None:
        value = dict(model.named_parameters())[name].view(-1)
        kept, value[-1] = value[-1].clone(), torch.nan
        try:
            sync.push()
        finally:
            value[-1] = kept

    def with_negative_scale(name: str) -> None:
        stream = PushStream(payload, digest=False)
        stream.check()
        rollout.begin(Manifest(payload.contract, payload.quantized, stream.specs(), rollout.policy_version() + 1))
        for item in stream.tensors():
            if item[0] == name:
                item[1].view(torch.uint8).view(-1)[-1] = 0x80
            rollout.load([item])
        rollout.commit()

    stack = "model.layers.1.mlp.experts.down_proj"
    for attempt, name in (
        (with_nan, "model.norm.weight"),
        (with_nan, stack),
        (with_negative_scale, f"{stack}.weight_scale"),
    ):
        try:
            attempt(name)
        except QuadsError as e:
            message = str(e)
        else:
            message = "nothing"
        say(event="damage", tensor=name, message=message[:200])
        assert message.startswith(name), f"a push with damage in {name} raised {message}"


def install_only(llm: Any, sync: Any, bandwidth: float, experts: int, packed_bytes: int) -> None:
    """Quantize and install all experts, without what the trainer does: tensors lie ready on the GPU."""
    from trainer_qat.push_stream import PushStream
    from vllm_quads.refit import Lasting, Manifest, Rollback, as_engine

    rollout, payload = as_engine(llm), sync.payload

    def install(packed: bool, floor: float) -> None:
        stream = PushStream(payload, packed=packed, digest=False)
        stream.check()
        ready = list(stream.tensors())
        stacks = [x for x in ready if ".experts." in x[0]]
        rest = [x for x in ready if ".experts." not in x[0]]
        for repeat in range(5):
            version = rollout.policy_version() + 1
            rollout.begin(
                Manifest(payload.contract, payload.quantized, stream.specs(), version, rollback=Rollback.NONE)
            )
            host, seconds = timed(lambda: seconds_of(lambda: rollout.load(Lasting(stacks))))
            _, rest_seconds = timed(lambda: rollout.load(Lasting(rest, resident=True)))
            report, commit_seconds = timed(rollout.commit)
            say(event="install", packed=packed, repeat=repeat, experts=seconds, ratio=seconds / floor,
                host=host, rest=rest_seconds, commit=commit_seconds, **dict(report.seconds))  # fmt: skip

    install(False, experts / bandwidth)
    install(True, packed_bytes / bandwidth)


def generate(llm: Any) -> list[float]:
    """Greedy tokens and their log-probs, through the captured graphs."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": list(range(5, 21))}] * 4, params, use_tqdm=False)
    tokens = [float(t) for o in outputs for t in o.outputs[0].token_ids]
    return tokens + [next(iter(e.values())).logprob for o in outputs for e in o.outputs[0].logprobs]


def peer(kind: str, layers: int, directory: Path, repeats: int) -> None:
    """vLLM's own reload of the same model, from BF16 tensors that lie on the GPU."""
    llm, seconds = timed(lambda: engine(kind, layers, directory, 0.5))
    say(event="engine", kind=kind, start=seconds, gib=torch.cuda.memory_allocated() / 2**30)
    bandwidth = copy_bandwidth()
    c = QWEN3_30B_A3B
    hidden, inter, experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    heads, keys = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = {
        "mlp.experts.gate_up_proj": normal(experts, 2 * inter, hidden),
        "mlp.experts.down_proj": normal(experts, hidden, inter),
        "mlp.gate.weight": normal(experts, hidden),
        "self_attn.q_proj.weight": normal(heads, hidden),
        "self_attn.k_proj.weight": normal(keys, hidden),
        "self_attn.v_proj.weight": normal(keys, hidden),
        "self_attn.o_proj.weight": normal(hidden, heads),
        "self_attn.q_norm.weight": normal(c["head_dim"]),
        "self_attn.k_norm.weight": normal(c["head_dim"]),
        "input_layernorm.weight": normal(hidden),
        "post_attention_layernorm.weight": normal(hidden),
    }
    table = normal(c["vocab_size"], hidden)

    def tensors(stacked: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", table
        for i in range(layers):
            for name, t in layer.items():
                if stacked or t.dim() < 3:
                    yield f"model.layers.{i}.{name}", t
                    continue
                for e in range(experts):
                    prefix = f"model.layers.{i}.mlp.experts.{e}"
                    if "down" in name:
                        yield f"{prefix}.down_proj.weight", t[e]
                    else:
                        yield f"{prefix}.gate_proj.weight", t[e, :inter]
                        yield f"{prefix}.up_proj.weight", t[e, inter:]
        yield "model.norm.weight", layer["input_layernorm.weight"]
        yield "lm_head.weight", table

    size = sum(t.nbytes for t in layer.values()) * layers + 2 * table.nbytes
    say(event="floor", copy_gbs=bandwidth / 1e9, bf16=size / bandwidth)
    for stacked in (False, True):
        for i in range(repeats):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                _, seconds = timed(
                    lambda s=stacked: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors(s)})
                )
            except Exception as e:
                say(event="reload", kind=kind, stacked=stacked, error=f"{type(e).__name__}: {e}"[:300])
                break
            peak = torch.cuda.max_memory_allocated() - before
            say(
                event="reload",
                kind=kind,
                stacked=stacked,
                repeat=i,
                seconds=seconds,
                ratio=seconds / (size / bandwidth),
                peak_gib=peak / 2**30,
            )
    generate(llm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("quads", "bf16", "fp8"))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="quads: say where the time of a packed push goes")
    parser.add_argument("--loaders", action="store_true", help="quads: load the same weights by vLLM's loaders, too")
    parser.add_argument("--out", type=Path, help="directory for refit-KIND.jsonl")
    options = parser.parse_args()
    environment.require_or_exit(hopper=False)
    faulthandler.enable()
    if options.out is not None:
        say.file = options.out / f"refit-{options.kind}.jsonl"  # type: ignore[attr-defined]
    say(event="start", layers=options.layers, environment=environment.describe())
    with TemporaryDirectory() as directory:
        if options.kind == "quads":
            quads(options, Path(directory))
        else:
            peer(options.kind, options.layers, Path(directory), options.repeats)


if __name__ == "__main__":
    main()
