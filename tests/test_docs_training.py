# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/training.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from trainer_models import qwen3, single_thread, tokens  # noqa: F401

PAGE = Path(__file__).parent.parent / "docs" / "training.md"


def test_examples_run(tmp_path: Path) -> None:
    """All Python blocks in order, in one namespace; what they log is flat and finite."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    model, ids, logged = qwen3(), tokens(2, 16), {}
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "ids": ids,
        "temperature": 1.0,
        "rollout": torch.full((2, 15), -4.0),
        "mask": torch.ones(2, 15),
        "mask_of_ids": torch.ones(2, 16),
        "log": logged.update,
        "picture": tmp_path / "gap.png",
    }
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "gap.png").exists()
    for key in ("mismatch/k3_kl", "mismatch/rollout_is_mean", "probe/layer_001/mean_gap", "probe/kl"):
        assert isinstance(logged[key], float)
