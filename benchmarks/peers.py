# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MoE kernels on the same shapes, for comparison: BF16, FP8 (128x128 blocks), Marlin NVFP4 (W4A16)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

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


PEERS: dict[str, Callable[[int, int, int], Layer]] = {
    "BF16 (Triton)": bf16,
    "FP8 128x128 block": fp8_block,
    "Marlin NVFP4 W4A16": marlin_nvfp4,
}
