# SPDX-License-Identifier: Apache-2.0
"""A random Qwen3-MoE checkpoint that is never written: tensors are made on the device when the loader asks for them.

Weights are N(0, 0.02²) as at the initialisation of a model, cut at five standard deviations; norms are 1. Every form is
the same BF16 weights: `bf16` as they are, `fp8-block` in E4M3 with a float32 scale per 128x128 block, `nvfp4` as
ModelOpt stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_quads.nvfp4 import PackedTensor, QuadsError

STD = 0.02
_CUT = 5 * STD
_FP8_MAX = 448.0
Named = Iterator[tuple[str, Tensor]]


def random_checkpoint(config: Any, form: str, device: torch.device | str, seed: int = 0) -> Named:
    """(name, tensor) of every tensor of the checkpoint, in the names of Hugging Face.

    `config` has the fields of a Qwen3MoeConfig. The values depend on the seed and the device's generator only, so every
    form and every engine gets the same weights. Raises QuadsError for an unknown form.
    """
    forms: dict[str, Callable[[list[str], Tensor], Named]] = {"bf16": _bf16, "fp8-block": _fp8_block, "nvfp4": _nvfp4}
    if form not in forms:
        raise QuadsError(f"form is {form!r}, expected one of {', '.join(forms)}")
    linear = forms[form]
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        w = torch.randn(shape, device=device, generator=gen).mul_(STD).clamp_(-_CUT, _CUT)
        return w.to(torch.bfloat16)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    hidden, head = config.hidden_size, config.head_dim
    inner = config.moe_intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "model.embed_tokens.weight", normal(config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", ones(hidden)
        yield f"{layer}.post_attention_layernorm.weight", ones(hidden)
        yield f"{layer}.self_attn.q_norm.weight", ones(head)
        yield f"{layer}.self_attn.k_norm.weight", ones(head)
        for name, rows, columns in (
            ("q_proj", queries, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, queries),
        ):
            yield from linear([f"{layer}.self_attn.{name}"], normal(1, rows, columns))
        yield f"{layer}.mlp.gate.weight", normal(config.num_experts, hidden)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            names = [f"{layer}.mlp.experts.{e}.{name}" for e in range(config.num_experts)]
            yield from linear(names, normal(config.num_experts, rows, columns))
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", normal(config.vocab_size, hidden)


def _bf16(names: list[str], w: Tensor) -> Named:
    for name, matrix in zip(names, w, strict=True):
        yield f"{name}.weight", matrix


def _fp8_block(names: list[str], w: Tensor) -> Named:
    _, n, k = w.shape
    for name, matrix in zip(names, w, strict=True):
        blocks = matrix.to(torch.float32).reshape(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _FP8_MAX
        yield f"{name}.weight", (blocks / scale[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
        yield f"{name}.weight_scale_inv", scale


def _nvfp4(names: list[str], w: Tensor) -> Named:
    # One amax for all: q, k and v, and gate and up, then share their global scale, as vLLM's fused layers want it.
    amax = torch.full((len(names),), _CUT, device=w.device, dtype=w.dtype).to(torch.float32)
    packed = PackedTensor.quantize(w, amax=amax)
    scales = packed.block_scales.view(torch.uint8)  # float8 tensors lack kernels in some torch releases
    for e, name in enumerate(names):
        yield f"{name}.weight", packed.codes[e]
        yield f"{name}.weight_scale", scales[e].view(torch.float8_e4m3fn)
        yield f"{name}.weight_scale_2", packed.decode_scale[e]
        yield f"{name}.input_scale", torch.ones((), device=w.device)
