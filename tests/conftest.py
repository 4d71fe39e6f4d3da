# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: tiny random MoE checkpoints and in-process vLLM engines.

An engine of the tiny models takes about two seconds after the first; each test module should build few and share them.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before vLLM is imported: engines in this process, little memory, no network, only errors on the console.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# A shell's background jobs, and what they start, ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HIDDEN, INTER, LAYERS, EXPERTS, TOP_K, VOCAB = 64, 48, 2, 4, 2, 256


def _save(model_type: str, path: Path, seed: int, **extra: Any) -> Path:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's CPU attention knows on every CPU
        "vocab_size": VOCAB,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 512,
        "dtype": torch.bfloat16,
        "initializer_range": 0.2,
        **extra,
    }
    if model_type == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **{
                "num_experts": EXPERTS,
                "moe_intermediate_size": INTER,
                "intermediate_size": 96,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "tie_word_embeddings": False,
                **common,
            }
        )
    else:
        config = transformers.MixtralConfig(num_local_experts=EXPERTS, intermediate_size=INTER, **common)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_tiny(model_type, seed=0, **config) -> directory of a random BF16 checkpoint (`qwen3_moe` or `mixtral`)."""

    def make(model_type: str, seed: int = 0, **config: Any) -> Path:
        return _save(model_type, tmp_path_factory.mktemp(model_type) / "model", seed, **config)

    return make


@pytest.fixture(scope="session")
def tiny_qwen3_moe(make_tiny: Callable[..., Path]) -> Path:
    """A random two-layer Qwen3-MoE: hidden 64, 4 experts of 48, top-2, vocabulary 256."""
    return make_tiny("qwen3_moe")


@pytest.fixture(scope="session")
def tiny_mixtral(make_tiny: Callable[..., Path]) -> Path:
    """A random two-layer Mixtral of the same sizes."""
    return make_tiny("mixtral")


def start_engine(model: Path | str, **options: Any) -> Any:
    """An in-process vLLM `LLM`, quantization='quads' unless told otherwise, small and eager."""
    import torch
    from vllm import LLM

    if not gc.get_freeze_count():
        gc.freeze()  # every shutdown collects garbage three times: leave the imported libraries out of it
    defaults: dict[str, Any] = {
        "quantization": "quads",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,  # otherwise each engine takes VLLM_CPU_KVCACHE_SPACE
        "seed": 0,
        "disable_log_stats": True,
    }
    dtype = torch.get_default_dtype()
    try:
        return LLM(str(model), **(defaults | options))
    finally:
        torch.set_default_dtype(dtype)  # vLLM before 0.30 leaves the model's behind if the start fails


def stop_engine(llm: Any) -> None:
    """Give the engine's memory back before the next one starts."""
    shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    gc.collect()


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """engine(model, **LLM options) -> an in-process `LLM`, stopped when the test ends."""
    started: list[Any] = []

    def start(model: Path | str, **options: Any) -> Any:
        started.append(start_engine(model, **options))
        return started[-1]

    yield start
    while started:
        stop_engine(started.pop())


@pytest.fixture(scope="module")
def module_engine() -> Iterator[Callable[..., Any]]:
    """Like `engine`, but shared by a module: the same model and options give the same engine."""
    started: dict[str, Any] = {}

    def start(model: Path | str, **options: Any) -> Any:
        key = repr((str(model), sorted(options.items(), key=lambda item: item[0])))
        if key not in started:
            started[key] = start_engine(model, **options)
        return started[key]

    yield start
    while started:
        stop_engine(started.popitem()[1])
