# SPDX-License-Identifier: Apache-2.0
"""Refits of engines on GPUs, without a test runner: `python tests/refit_gpu_checks.py colocated served`.

Each returns facts worth printing, and raises AssertionError or RefitError.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from serving_helpers import ON_GPU, Background, complete, get, manifest, serving, train, trainer, with_tokenizer

from trainer_qat import RolloutSync, export_checkpoint
from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit import HttpEngine, as_engine

PROMPTS = [list(range(3, 40)), [5, 9, 200], [17], list(range(100, 121))]


def say(*words: Any) -> None:
    """A line of progress with the time since the start: what a killed run has reached."""
    print(f"{time.perf_counter() - BEGIN:6.1f} s", *words, flush=True)


BEGIN = time.perf_counter()
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # which is compiled at the first start, for a minute


def checkpoint(path: Path) -> Path:
    """A random Qwen3-MoE that the fused kernels take: hidden 256, 8 experts of 256, top-2, 2 layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=256, hidden_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=256,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, max_position_embeddings=512,
        initializer_range=0.2, dtype=torch.bfloat16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(path / "bf16")
    return with_tokenizer(path / "bf16", path / "model")


def colocated(path: Path) -> dict[str, Any]:
    """Trainer and `AsyncLLM` on one GPU, tensors by CUDA IPC, captured CUDA graphs, sleep levels 1 and 2 in between.

    After every push the log-probs equal those of the engine's own load of the same weights.
    """
    facts: dict[str, Any] = {}
    source = checkpoint(path)
    model = trainer(source, device="cuda")
    first = {n: t.clone() for n, t in model.state_dict().items()}
    graphs = {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
    }
    start = time.perf_counter()
    say("trainer ready")
    engine = Background(
        source, enforce_eager=False, enable_sleep_mode=True, max_num_batched_tokens=256, **ON_GPU, **graphs
    )
    facts["start"] = time.perf_counter() - start
    say("engine ready")
    try:
        sync = RolloutSync(model, engine.llm)
        rollout: Any = as_engine(engine.llm)
        fresh = engine.scores(PROMPTS)
        assert engine.scores(PROMPTS) == fresh, "the engine does not repeat itself"
        assert rollout.fingerprint() == sync.payload.fingerprint()

        say("log-probs repeat, fingerprints agree")
        train(model, 1)
        report = sync.push()
        assert report.verified, report
        facts["packed"] = dict(report.seconds)
        say("packed push", facts["packed"])
        changed = engine.scores(PROMPTS)
        assert changed != fresh
        facts["bf16"] = dict(sync.push(packed=False).seconds)
        assert engine.scores(PROMPTS) == changed, "a BF16 push differs from a packed one"

        say("BF16 push", facts["bf16"])
        rollout.sleep(1)
        facts["free while asleep"] = torch.cuda.mem_get_info()[0] / 2**30
        rollout.wake_up()
        facts["free when awake"] = torch.cuda.mem_get_info()[0] / 2**30
        assert engine.scores(PROMPTS) == changed, "sleep level 1 changed something"
        model.load_state_dict(first)
        sync.push()
        assert engine.scores(PROMPTS) == fresh, "a refit after sleep level 1 differs from a fresh load"

        say("sleep level 1")
        rollout.sleep(2)
        rollout.wake_up()
        assert rollout.status().state.value == "refusing", rollout.status()
        waiting = engine.submit(engine.generate(PROMPTS[0]))
        time.sleep(0.3)
        assert not waiting.done(), "the engine answered without weights"
        facts["after level 2"] = dict(sync.push().seconds)
        waiting.result(60)
        assert rollout.status().state.value == "serving"
        assert rollout.fingerprint() == sync.payload.fingerprint()
        assert engine.scores(PROMPTS) == fresh, "a refit after sleep level 2 differs from a fresh load"
        say("sleep level 2", facts["after level 2"])

        rollout.sleep(2)
        rollout.wake_up()
        tensors = [pair for item in sync.payload.items() for pair in item.tensors().items()]
        rollout.begin(manifest(sync, rollout))
        said = ""
        try:
            rollout.load(tensors[:-1])
            rollout.commit()
        except RefitError as e:
            said = str(e)
        assert "refuses" in said, said
        assert rollout.status().state.value == "refusing"
        sync.push()
        assert engine.scores(PROMPTS) == fresh
    finally:
        engine.stop()
    return facts


def served(path: Path) -> dict[str, Any]:
    """`vllm serve` on the trainer's GPU: pushes by CUDA IPC and by files, checkpoint reload, sleep level 2, metrics."""
    facts: dict[str, Any] = {}
    source = checkpoint(path)
    model = trainer(source, device="cuda")
    first = {n: t.clone() for n, t in model.state_dict().items()}
    memory = [text for name, value in ON_GPU.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options = (*memory, "--enforce-eager", "--enable-sleep-mode")
    with serving(source, path / "log", *options, VLLM_SERVER_DEV_MODE="1") as url:
        facts |= _pushes(url, model, "ipc", path)
        engine = HttpEngine(url, "ipc")
        sync = RolloutSync(model, engine)
        model.load_state_dict(first)
        sync.push()
        before = [complete(url, p) for p in PROMPTS]
        files = HttpEngine(url, "disk")
        train(model, 2)
        facts["files"] = dict(RolloutSync(model, files).push().seconds)
        assert [complete(url, p) for p in PROMPTS] != before
        model.load_state_dict(first)
        RolloutSync(model, files).push()
        assert [complete(url, p) for p in PROMPTS] == before, "a push by files differs"
        files.close()
        engine.sleep(2)
        engine.wake_up()
        assert engine.status().state.value == "refusing"
        sync.push()
        assert [complete(url, p) for p in PROMPTS] == before, "a refit after sleep level 2 differs"
        facts["metrics"] = [line for line in get(f"{url}/metrics").splitlines() if line.startswith("quads_policy")]
    return facts


def _pushes(url: str, model: Any, data: str, path: Path) -> dict[str, Any]:
    """Push the served weights, others, and the served ones again."""
    first = {n: t.clone() for n, t in model.state_dict().items()}
    fresh = [complete(url, p) for p in PROMPTS]
    engine = HttpEngine(url, data)
    sync = RolloutSync(model, engine)
    assert engine.fingerprint() == sync.payload.fingerprint()
    train(model, 1)
    start = time.perf_counter()
    report = sync.push()
    connected = time.perf_counter() - start
    changed = [complete(url, p) for p in PROMPTS]
    assert changed != fresh
    report = sync.push()
    assert [complete(url, p) for p in PROMPTS] == changed
    bf16 = sync.push(packed=False)
    assert report.verified, report
    assert bf16.verified, bf16
    assert bf16.fingerprint == report.fingerprint == sync.payload.fingerprint()
    assert [complete(url, p) for p in PROMPTS] == changed, "a BF16 push differs from a packed one"
    model.load_state_dict(first)
    exported = export_checkpoint(model, path / f"export-{data}")
    HttpEngine(url, "disk").load_checkpoint(exported.path, fingerprint=exported.fingerprint)
    assert [complete(url, p) for p in PROMPTS] == fresh, "a checkpoint reload differs from the server's own load"
    train(model, 1)
    model.load_state_dict(first)
    sync.push()
    assert [complete(url, p) for p in PROMPTS] == fresh, f"a push over {data} differs from the server's own load"
    engine.close()
    return {"first push": connected, "packed": dict(report.seconds), "bf16": dict(bf16.seconds)}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    failed = False
    for name in sys.argv[1:]:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                print(
                    "OK  ", name, f"{time.perf_counter() - begun:.1f} s", globals()[name](Path(directory)), flush=True
                )
            except BaseException:
                import traceback

                failed = True
                print("FAIL", name, f"{time.perf_counter() - begun:.1f} s", flush=True)
                traceback.print_exc()
                for log in sorted(Path(directory).glob("log*")):
                    print("\n".join(log.read_text().splitlines()[-40:]))
    sys.exit(failed)
