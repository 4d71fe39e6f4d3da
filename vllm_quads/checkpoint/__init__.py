# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints: read, write, verify and inspect the `quads`, ModelOpt and compressed-tensors formats."""

from __future__ import annotations

from vllm_quads.checkpoint.info import CheckpointInfo, detect
from vllm_quads.checkpoint.inspection import Inspection, LayerSummary, inspect_checkpoint
from vllm_quads.checkpoint.layouts import Format
from vllm_quads.checkpoint.load import fingerprint_checkpoint, iter_packed, load_packed
from vllm_quads.checkpoint.quantize import QuantizeReport, quantize_checkpoint
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.checkpoint.verify import verify_headers
from vllm_quads.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointWriter",
    "Format",
    "Inspection",
    "LayerSummary",
    "QuantizeReport",
    "detect",
    "fingerprint_checkpoint",
    "inspect_checkpoint",
    "iter_packed",
    "load_packed",
    "quantize_checkpoint",
    "verify_headers",
]
