# SPDX-License-Identifier: Apache-2.0
"""Calibration of `quads quantize --calibrate`: the model answers prompts, and its activations are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_quads.checkpoint import detect
from vllm_quads.checkpoint.layouts import Format
from vllm_quads.cli.run import stdout_to_stderr
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import CheckpointError, Contract, QuadsError, Scheme

_RANGE = 2688.0
Progress = Callable[[int, int, str], None]


def calibrate_checkpoint(
    src: Path,
    contract: Contract,
    prompts_file: Path,
    *,
    prompts: int,
    tokens: int,
    device: str,
    progress: Progress,
) -> tuple[CompensationState, dict[str, float]]:
    """Compensation state, and static input scales (amax/2688) by canonical name, from a BF16 checkpoint.

    The model samples an answer of `tokens` tokens to each of the first `prompts` lines (seeded); gradients of those
    answers give the sensitivities, and a forward pass over them the error statistics.

    Raises CheckpointError for a quantized source, QuadsError for a file without prompts.
    """
    if contract.scheme is not Scheme.W4A4:
        raise QuadsError("--calibrate: scheme w4a16 does not quantize activations, so there is nothing to calibrate")
    if detect(src).format is not Format.BF16:
        raise CheckpointError(f"{src}: is already quantized; calibrate and quantize the BF16 checkpoint")
    try:
        text = prompts_file.read_text(encoding="utf-8")
    except ValueError as e:
        raise QuadsError(
            f"--calibrate: {prompts_file} is not UTF-8 text ({e.__class__.__name__}); one prompt a line"
        ) from e
    lines = [line.strip() for line in text.splitlines() if line.strip()][:prompts]
    if not lines:
        raise QuadsError(f"{prompts_file}: holds no prompt; give one per line")
    with stdout_to_stderr():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from trainer_qat.calibration import calibrate
        from trainer_qat.sensitivity import sensitivities

        progress(0, 4, "loading the model")
        try:
            model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16).eval().to(device)
            tokenizer = AutoTokenizer.from_pretrained(src)
        except (ValueError, KeyError, OSError, TypeError) as e:  # whatever transformers raises for odd configurations
            raise QuadsError(f"{src}: transformers cannot load it for --calibrate: {e}") from e
        ids = _tokenize(tokenizer, lines)
        progress(1, 4, "sampling answers")
        torch.manual_seed(0)
        answers = [_answer(model, row, tokens) for row in ids]
        progress(2, 4, "taking gradients")
        weights = sensitivities(model, ids, answers, contract=contract)
        progress(3, 4, "measuring activations")
        batches = [torch.tensor([a + b]) for a, b in zip(ids, answers, strict=True)]
        state = calibrate(model, batches, contract, sensitivities=weights)
        scales = _input_scales(model, contract, batches)
        progress(4, 4, "")
    return state, scales


def _tokenize(tokenizer: Any, lines: Sequence[str]) -> list[list[int]]:
    if getattr(tokenizer, "chat_template", None) is None:
        return [list(tokenizer(line).input_ids) for line in lines]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": line}], add_generation_prompt=True, return_dict=False
            )
        )
        for line in lines
    ]


def _answer(model: Any, prompt: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
        )
    return [int(t) for t in out[0, len(prompt) :]]


def _input_scales(model: Any, contract: Contract, batches: Sequence[Tensor]) -> dict[str, float]:
    """amax/2688 of the input of every quantized weight: one for all experts of a layer; 1.0 where no token came by."""
    from trainer_qat.observe import Pass, observing, quantized_weights, site_of

    amax: dict[str, float] = {}

    def observe(p: Pass) -> None:
        seen = float(p.x.abs().amax()) if p.x.numel() else 0.0
        amax[p.site.name] = max(amax.get(p.site.name, 0.0), seen)

    with torch.no_grad(), observing(model, contract, observe):
        for batch in batches:
            model(input_ids=batch.to(model.device), use_cache=False)
    names = [name for w in quantized_weights(model, contract) for name in w.matrices]
    scales = {name: amax.get(site_of(name).name, 0.0) / _RANGE for name in names}
    return {name: scale or 1.0 for name, scale in scales.items()}
