# SPDX-License-Identifier: Apache-2.0
"""torch.compile: the quantizer's arithmetic is out of Inductor's reach, and there is no graph break."""

from __future__ import annotations

import torch
from trainer_models import ALL_LINEARS, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import prepare_qat, qat_disabled
from trainer_qat.fake_quant import representable
from trainer_qat.prepare import expert_weights
from vllm_quads.nvfp4 import fake_quantize_weight, weight_amax


def test_compiled_weights_equal_eager_bit_for_bit() -> None:
    """The compiled forward sees the reference's numbers in every layer, follows updates, and is one graph."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, ALL_LINEARS)
    layer = model.model.layers[0]

    @torch.compile(fullgraph=True)
    def weights() -> tuple[torch.Tensor, ...]:
        return *expert_weights(layer.mlp.experts), layer.self_attn.k_proj.quads_weight

    for _ in range(2):
        qkv = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        amax = torch.stack([weight_amax(m.weight.to(torch.bfloat16)) for m in qkv]).amax()
        gate_up, down, k = weights()
        assert torch.equal(gate_up, fake_quantize_weight(layer.mlp.experts.gate_up_proj))
        assert torch.equal(down, fake_quantize_weight(layer.mlp.experts.down_proj))
        assert torch.equal(k, fake_quantize_weight(layer.self_attn.k_proj.weight, amax=amax))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.37)


def test_compiled_training_step_has_straight_through_gradients() -> None:
    """Whole compiled model: one graph, loss and gradients equal eager's to FP32 rounding."""
    model = qwen3("batched_mm", dtype=torch.float32)
    prepare_qat(model, ALL_LINEARS)

    def gradients(run: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = run(tokens(), labels=tokens()).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    eager_loss, eager = gradients(model)
    loss, grads = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(loss, eager_loss, rtol=1e-5, atol=1e-6)
    assert len(grads) == len(eager)
    for a, b in zip(grads, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_saturation_mask() -> None:
    """The clamp gradient's mask marks exactly the elements that a frozen, too small scale cannot hold."""
    weight = torch.tensor([[1.0] * 15 + [40.0]])
    mask = representable(weight, torch.tensor(10.0))  # frozen amax 10: 6 * 448 / 268.8 = 10 is the largest value
    assert mask[0, :15].all()
    assert not mask[0, 15]
    assert representable(weight, torch.tensor(40.0)).all()


def test_switching_off_reaches_the_compiled_model() -> None:
    """qat_disabled on a compiled model computes with plain weights, and back."""
    model = qwen3("grouped_mm")
    plain = model(tokens(), labels=tokens()).loss
    prepare_qat(model, ALL_LINEARS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    quantized = compiled(tokens(), labels=tokens()).loss
    with qat_disabled(compiled):
        torch.testing.assert_close(compiled(tokens(), labels=tokens()).loss, plain, rtol=1e-5, atol=1e-6)
    assert compiled(tokens(), labels=tokens()).loss == quantized
    assert abs(quantized - plain) > 1e-3
