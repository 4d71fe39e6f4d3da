# SPDX-License-Identifier: Apache-2.0
"""What the plugin tests do with engines and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PROMPTS = [list(range(3, 40)), [5, 9, 200], [17], list(range(100, 121))]


def scores(llm: Any, max_tokens: int = 6) -> list[float]:
    """Log-probs of every prompt token and of every greedily decoded token; equal lists mean equal engines.

    The prefix cache is reset first, and prompt log-probs bypass it: use `generate` to see a stale cache.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False)
    llm.reset_prefix_cache()
    out = []
    for request in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False):
        out += [next(iter(entry.values())).logprob for entry in request.prompt_logprobs[1:]]
        out += [next(iter(entry.values())).logprob for entry in request.outputs[0].logprobs]
        out += [float(t) for t in request.outputs[0].token_ids]
    return out


def decoded(llm: Any, prompt: list[int], max_tokens: int = 4) -> list[float]:
    """Log-probs of greedily decoded tokens, with whatever the prefix cache holds."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return [next(iter(entry.values())).logprob for entry in request.outputs[0].logprobs]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory."""
    out: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            out |= {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (not a mapping)
    return out


def damaged(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """Copy a checkpoint, with its tensors changed in place by `change` and config.json entries replaced."""
    target.mkdir(parents=True)
    tensors = tensors_of(source)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(data))
    for extra in ("hf_quant_config.json", "generation_config.json"):
        if (source / extra).exists():
            (target / extra).write_bytes((source / extra).read_bytes())
    return target


def named(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors as a trainer would send them."""
    yield from tensors_of(path).items()


def quads_layers(llm: Any) -> dict[str, Any]:
    """Runtimes of the quantized layers of an in-process engine, by site prefix."""
    from vllm_quads.plugin.policy import config_of

    return llm.apply_model(lambda model: dict(config_of(model).runtimes))[0]


def as_float(t: Tensor) -> Tensor:
    """For messages and comparisons of float8 tensors."""
    return t.to(torch.float32)


def manifest(llm: Any, tensors: dict[str, Tensor], fingerprint: str | None, **extra: Any) -> Any:
    """What a push of these tensors announces; `extra` are further fields of it."""
    from vllm_quads.refit import Manifest, TensorSpec, as_engine

    engine = as_engine(llm)
    specs = {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    version = extra.pop("version", engine.policy_version() + 1)
    return Manifest(engine.contract(), engine.quantized(), specs, version, fingerprint, **extra)


def push(llm: Any, tensors: dict[str, Tensor], fingerprint: str | None, **extra: Any) -> Any:
    """Push tensors one by one; returns the report."""
    from vllm_quads.refit import as_engine

    engine = as_engine(llm)
    engine.begin(manifest(llm, tensors, fingerprint, **extra))
    for item in tensors.items():
        engine.load([item])
    return engine.commit()


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a checkpoint as stacks, everything else as it is; the largest tensor of a stack last."""
    out = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(2):
        head = f"model.layers.{layer}.mlp.experts"
        for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for suffix in ("weight_scale_2", "weight_scale", "weight"):
                names = [[f"{head}.{e}.{part}.{suffix}" for part in parts] for e in range(4)]
                if names[0][0] not in tensors:
                    continue
                if suffix == "weight_scale_2":
                    value = torch.stack([torch.stack([tensors[n] for n in row]) for row in names]).squeeze(-1)
                    out[f"{head}.{stack}.{suffix}"] = value
                    continue
                dtype = tensors[names[0][0]].dtype
                rows = [torch.cat([tensors[n].view(torch.uint8) for n in row]) for row in names]
                name = f"{head}.{stack}" if dtype == torch.bfloat16 else f"{head}.{stack}.{suffix}"
                out[name] = torch.stack(rows).view(dtype)
    return out
