# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 in a real engine: latent attention, shared experts, a dense first layer, a score-correction buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import scores
from trainer_models import deepseek

from trainer_qat import RolloutSync, export_checkpoint, prepare_qat
from vllm_quads.nvfp4 import Contract
from vllm_quads.refit import as_engine

pytest.importorskip("vllm", reason="needs vLLM")

OPTIONS = {
    "targets": ["*.experts.*", "*.shared_experts.*", "*.self_attn.*", "*.layers.0.mlp.*_proj"],
    "ignore": ["*.kv_b_proj"],
}


def served() -> Any:
    """Two layers, with the one latent size that vLLM's CPU attention knows, and its name for the router's method."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    model = deepseek(vocab_size=256, **latent)
    model.config.topk_method = "noaux_tc"
    return model


def test_latent_attention_all_the_way(engine: Callable[..., Any], tmp_path: Path) -> None:
    """An engine that quantizes the BF16 checkpoint itself has the trainer's bytes (q_a and kv_a share a scale there);
    after pushes, packed and BF16, it gives what a fresh engine gives on the export, so what vLLM absorbs out of
    kv_b_proj has followed."""
    model = served()
    model.save_pretrained(tmp_path / "base")
    llm = engine(tmp_path / "base", additional_config={"quads": OPTIONS})
    prepare_qat(model, Contract().merged(OPTIONS))
    sync = RolloutSync(model, llm)
    assert as_engine(llm).fingerprint() == sync.payload.fingerprint()
    before = scores(llm)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p.dtype))
    report = sync.push()
    after = scores(llm)
    assert after != before
    assert sync.push(packed=False).fingerprint == report.fingerprint
    assert scores(llm) == after
    assert export_checkpoint(model, tmp_path / "out").fingerprint == report.fingerprint
    assert scores(engine(tmp_path / "out")) == after
