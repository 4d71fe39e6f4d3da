# SPDX-License-Identifier: Apache-2.0
"""Refits of engines on a GPU (see `refit_gpu_checks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_colocated_engine(tmp_path: Path) -> None:
    """CUDA IPC into an `AsyncLLM` with captured graphs, and sleep levels 1 and 2: log-probs equal a fresh load's."""
    from refit_gpu_checks import colocated

    colocated(tmp_path)


def test_served_engine(tmp_path: Path) -> None:
    """The same for `vllm serve`, also by files and by checkpoint directory."""
    from refit_gpu_checks import served

    served(tmp_path)
