# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of `quads gap`: where it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_quads.gap import GapOptions, trainer
from vllm_quads.nvfp4 import QuadsError


def test_auto_takes_a_gpu_with_room(tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: without a GPU the CPU; with one that has room for weights, their cache and logits, that one; an explicit
    device is taken as it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trainer.choose_device("auto", tiny_qwen3_moe, 100, 1000) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needed = trainer._bytes_needed(tiny_qwen3_moe, 100, 1000)
    assert trainer._bytes_needed(tiny_qwen3_moe, 100, 2000) == needed + 4 * 1000 * 256
    for free, expected in ((needed - 1, "cpu"), (needed, "cuda")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 << 30))
        assert trainer.choose_device("auto", tiny_qwen3_moe, 100, 1000) == expected
        assert trainer.choose_device("cuda", tiny_qwen3_moe, 100, 1000) == "cuda"
        assert trainer.choose_device("cpu", tiny_qwen3_moe, 100, 1000) == "cpu"


def test_unknown_device() -> None:
    """The options name the devices that there are."""
    with pytest.raises(QuadsError, match="expected one of auto, cpu, cuda"):
        GapOptions(trainer_device="tpu")


def test_a_trainer_that_does_not_fit(tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that runs out of memory ends in a message that names the option."""

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(trainer, "_measured", full)
    with pytest.raises(QuadsError, match="--trainer-device cpu"):
        trainer.scores_and_sensitivities(tiny_qwen3_moe, None, "cpu", ([], []), ([], []))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cpu_and_gpu_agree(make_tiny: Callable[..., Path]) -> None:
    """Log-probs of both trainers, and sensitivities, are the CPU's up to rounding in BF16."""
    from vllm_quads.nvfp4 import Contract

    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = make_tiny("qwen3_moe", initializer_range=0.05, **sizes)
    ids = ([[1, 2, 3], [7, 8]], [[4, 5, 6, 7], [9, 10]])
    (cpu, there), (gpu, here) = (
        trainer.scores_and_sensitivities(model, Contract(), device, ids, ids) for device in ("cpu", "cuda")
    )
    for name in ("BF16", "QAT"):
        for a, b in zip(cpu[name], gpu[name], strict=True):
            assert b.device.type == "cpu"
            assert float((b - a).abs().mean()) < 2e-2, name
    assert here.keys() == there.keys()
    for site, value in there.items():
        assert here[site] == pytest.approx(value, rel=0.3), site
