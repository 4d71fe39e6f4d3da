# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MoE kernels on the same shapes, for comparison: BF16, FP8 (per tensor, 128x128 blocks), Marlin NVFP4.

These are internals of vLLM, as of 0.26: where a version has moved them, the peer is reported as not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from vllm_quads.bench.tables import FP8_BLOCK

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [M, H], router weights [M, k], expert ids [M, k] -> y [M, H]."""


def _random(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 0.05) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device="cuda")
    for part in out:
        part.copy_(torch.randn(part.shape, device="cuda") * scale)
    return out


def bf16(experts: int, hidden: int, intermediate: int) -> Layer:
    """Triton fused MoE with vLLM's tuned configuration for this GPU, where it ships one."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13 = _random((experts, 2 * intermediate, hidden), torch.bfloat16)
    w2 = _random((experts, hidden, intermediate), torch.bfloat16)
    return lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids)


def fp8_tensor(experts: int, hidden: int, intermediate: int) -> Layer:
    """Triton fused MoE W8A8 with one scale per expert and GEMM, activations quantized dynamically per tensor."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13 = _random((experts, 2 * intermediate, hidden), torch.float8_e4m3fn, 40.0)
    w2 = _random((experts, hidden, intermediate), torch.float8_e4m3fn, 40.0)
    scale = torch.full((experts,), 0.05 / 40, device="cuda")
    config = fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale.clone())
    return lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids, quant_config=config)


def fp8_block(experts: int, hidden: int, intermediate: int) -> Layer:
    """Triton fused MoE W8A8 with 128x128 weight blocks, activations quantized per token and 128 channels."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13 = _random((experts, 2 * intermediate, hidden), torch.float8_e4m3fn, 40.0)
    w2 = _random((experts, hidden, intermediate), torch.float8_e4m3fn, 40.0)
    s13 = torch.full((experts, 2 * intermediate // 128, hidden // 128), 0.05 / 40, device="cuda")
    s2 = torch.full((experts, hidden // 128, intermediate // 128), 0.05 / 40, device="cuda")
    config = fp8_w8a8_moe_quant_config(w1_scale=s13, w2_scale=s2, block_shape=[128, 128])
    return lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids, quant_config=config)


def marlin_nvfp4(experts: int, hidden: int, intermediate: int) -> Layer:
    """What stock vLLM runs for an NVFP4 checkpoint on Hopper: weights in FP4, activations in BF16."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.scalar_type import scalar_types

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, device="cuda") * 400 + 20).to(torch.float8_e4m3fn)

    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=intermediate,
        params_dtype=torch.bfloat16,
    )
    w13, s13, g13, w2, s2, g2 = prepare_nvfp4_moe_layer_for_marlin(
        layer,
        codes(experts, 2 * intermediate, hidden // 2),
        scales(experts, 2 * intermediate, hidden // 16),
        torch.full((experts,), 1e-4, device="cuda"),
        codes(experts, hidden, intermediate // 2),
        scales(experts, hidden, intermediate // 16),
        torch.full((experts,), 1e-4, device="cuda"),
        True,
    )
    return lambda x, weights, ids: fused_marlin_moe(
        x,
        w13,
        w2,
        None,
        None,
        s13,
        s2,
        weights,
        ids,
        quant_type_id=scalar_types.float4_e2m1f.id,
        global_scale1=g13,
        global_scale2=g2,
        workspace=layer.workspace,
    )


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with."""

    name: str
    build: Callable[[int, int, int], Layer]
    """(experts, hidden, intermediate) -> layer with random weights."""
    config: tuple[str | None, int] | None
    """(dtype, block) of vLLM's table of tuned Triton configurations; None: not a Triton kernel."""

    def note(self, experts: int, intermediate: int) -> str:
        """Whether vLLM ships a tuned configuration of this kernel for this card and shape."""
        if self.config is None:
            return ""
        from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

        dtype, block = self.config
        sizes = (block, block) if block else (None, None)
        found = get_moe_configs(experts, intermediate, dtype, *sizes)
        return "Triton, vLLM's tuned configuration" if found else "Triton, vLLM's default configuration (none tuned)"


PEERS = (
    Peer("BF16", bf16, (None, 0)),
    Peer("FP8 per tensor", fp8_tensor, ("fp8_w8a8", 0)),
    Peer(FP8_BLOCK, fp8_block, ("fp8_w8a8", 128)),
    Peer("Marlin NVFP4 W4A16", marlin_nvfp4, None),
)
