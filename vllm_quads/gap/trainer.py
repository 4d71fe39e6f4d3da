# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the gap experiment: on which device it runs, its scores, and its gradients.

Quantized weights are the same bits on every device. What is computed with them in BF16 is not: kernels sum in other
orders, so the numbers of a trainer on a CPU and of one on a GPU differ, as those of two BF16 engines do.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_quads.checkpoint import CheckpointReader
from vllm_quads.nvfp4 import Contract, QuadsError

DEVICES = ("auto", "cpu", "cuda")
_BATCH = 8
"""Sequences per forward pass, as in `trainer_qat.scoring.score` and `trainer_qat.sensitivities`."""
_LOGITS = 24
"""Bytes per logit of a batch: BF16 logits, float32 log-probs, and their gradients."""
_RESERVE = 2 << 30
"""For activations, and for what the allocator cannot use."""

Ids = Sequence[Sequence[int]]


class NoDevice(QuadsError):
    """The device that was asked for is not there."""

    exit_code = 3


def require_device(wanted: str) -> None:
    """Raise QuadsError for an unknown device, NoDevice for a GPU that is not there."""
    if wanted not in DEVICES:
        raise QuadsError(f"trainer_device: is {wanted!r}, expected one of {', '.join(DEVICES)}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise NoDevice(
            f"trainer_device: is 'cuda', but torch {torch.__version__} finds no GPU; take 'auto' or 'cpu', or check "
            f"the driver and the installation of torch"
        )


def choose_device(wanted: str, model: Path, longest: int, tokens: int) -> str:
    """`cpu` or `cuda`. `auto` is a GPU that has room for the trainer beside the engine that is already there.

    Args:
        wanted: one of DEVICES.
        model: the BF16 checkpoint.
        longest: tokens of the longest sequence, prompt included.
        tokens: tokens that are scored; every distribution is on the device in float32 until all are there.
    """
    require_device(wanted)
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if torch.cuda.mem_get_info()[0] >= _bytes_needed(model, longest, tokens) else "cpu"


def _bytes_needed(model: Path, longest: int, tokens: int) -> int:
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    with CheckpointReader(model) as reader:
        weights = 2 * reader.total_bytes  # twice: the quantized weights are kept (cache mode `dense`)
    return int(weights + _BATCH * longest * vocabulary * _LOGITS + 4 * tokens * vocabulary + _RESERVE)


def device_name(device: str) -> str:
    """`cpu`, or `cuda (NVIDIA H200)`."""
    return f"{device} ({torch.cuda.get_device_name()})" if device == "cuda" else device


def scores_and_sensitivities(
    model: Path, contract: Contract, device: str, calibration: tuple[Ids, Ids], evaluation: tuple[Ids, Ids]
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """What the BF16 and the QAT trainer think of the evaluation tokens, and sensitivities on the calibration tokens.

    calibration, evaluation: prompts and completions, token ids.

    Returns per trainer the float32 log-distributions [T, V] of each completion on the CPU, and a number per site. A GPU
    then has its memory back, for the engines. Raises QuadsError if the model does not fit there.
    """
    try:
        return _measured(model, contract, device, calibration, evaluation)
    except torch.cuda.OutOfMemoryError as e:
        raise QuadsError(
            f"the trainer does not fit into the memory that the engine leaves on the GPU ({e}); let it run on the CPU "
            f"(trainer_device='cpu', --trainer-device cpu)"
        ) from e
    finally:
        if device == "cuda":
            gc.collect()  # a prepared model refers to itself
            torch.cuda.empty_cache()


def _measured(
    model: Path, contract: Contract, device: str, calibration: tuple[Ids, Ids], evaluation: tuple[Ids, Ids]
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    from transformers import AutoModelForCausalLM

    from trainer_qat import prepare_qat
    from trainer_qat.scoring import score
    from trainer_qat.sensitivity import sensitivities

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to(device)
    scores = {"BF16": [s.cpu() for s in score(hf, *evaluation, batch_size=_BATCH)]}
    prepare_qat(hf, contract)
    scores["QAT"] = [s.cpu() for s in score(hf, *evaluation, batch_size=_BATCH)]
    return scores, sensitivities(hf, *calibration, batch_size=_BATCH)
