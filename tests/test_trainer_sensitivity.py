# SPDX-License-Identifier: Apache-2.0
"""Sensitivities, calibration and scoring on the Hugging Face model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainer_models import ALL_LINEARS, PerExpertModel, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import calibrate, prepare_qat, qat_disabled, score, sensitivities, token_log_probs
from trainer_qat.observe import Pass, observing, site_of
from vllm_quads.compensation import quantize_with_residual
from vllm_quads.nvfp4 import Contract, ContractError, QuadsError, Scheme

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
COMPLETIONS = [[3, 4], [5, 6, 7, 7, 7], [1, 2, 3, 4]]
SITES = {
    f"model.layers.{i}.{s}"
    for i in range(2)
    for s in ("mlp.experts.w13", "mlp.experts.w2", "self_attn.qkv_proj", "self_attn.o_proj")
}


def log_prob(model: nn.Module) -> torch.Tensor:
    """Sum of the completions' log-probs."""
    return torch.cat(token_log_probs(score(model, PROMPTS, COMPLETIONS), COMPLETIONS)).sum()


def test_sensitivity_is_the_squared_gradient_of_the_log_prob() -> None:
    """o_proj's value equals (d log p / d y)^2 by autograd on its output, per channel and scored token."""
    model = qwen3(dtype=torch.float32)
    got = sensitivities(model, [PROMPTS[1]], [COMPLETIONS[1]], contract=ALL_LINEARS)
    assert got.keys() == SITES
    kept = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda m, a, y: kept.append(y))
    ids = torch.tensor([PROMPTS[1] + COMPLETIONS[1]])
    log_probs = torch.log_softmax(model(ids).logits[0, 4:9], dim=-1)
    handle.remove()
    (grad,) = torch.autograd.grad(log_probs.gather(1, ids[0, 5:, None]).sum(), kept)
    expected = grad.square().sum() / (64 * len(COMPLETIONS[1]))
    assert got["model.layers.0.self_attn.o_proj"] == pytest.approx(float(expected), rel=1e-4)


def test_sensitivity_predicts_what_noise_does() -> None:
    """0.5 x sensitivity x squared error predicts the KL that small random errors of w13 and w2 outputs cause."""
    model = qwen3("eager", dtype=torch.float64)
    prompts, completions = tokens(12, 3).tolist(), []
    generator = torch.Generator().manual_seed(3)
    for p in prompts:  # sample from the policy itself: the squared-sum identity holds in expectation over samples
        ids = list(p)
        for _ in range(6):
            with torch.no_grad():
                probs = model(torch.tensor([ids])).logits[0, -1].softmax(dim=-1)
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
        completions.append(ids[len(p) :])
    got = sensitivities(model, prompts, completions, contract=Contract())
    clean = torch.cat(score(model, prompts, completions)).double()
    for site, attribute in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        torch.manual_seed(0)
        eps = 0.02

        def forward(self: nn.Module, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            for slot in range(index.shape[1]):
                y13 = torch.einsum("mk,mnk->mn", x, self.gate_up_proj[index[:, slot]])
                y13 = y13 + eps * torch.randn_like(y13) * (attribute == "gate_up_proj")  # noqa: B023
                h = self._apply_gate(y13)
                y2 = torch.einsum("mk,mnk->mn", h, self.down_proj[index[:, slot]])
                y2 = y2 + eps * torch.randn_like(y2) * (attribute == "down_proj")  # noqa: B023
                out = out + y2 * weight[:, slot, None]
            return out

        experts = model.model.layers[1].mlp.experts
        experts.forward = forward.__get__(experts)
        kls = []
        for _ in range(20):
            noisy = torch.cat(score(model, prompts, completions, batch_size=12)).double()
            kls.append((clean.exp() * (clean - noisy)).sum(dim=-1).mean())
        del experts.forward
        predicted = 0.5 * got[f"model.layers.1.mlp.experts.{site}"] * eps**2 * 64 * 2  # channels, experts per token
        assert float(torch.stack(kls).mean()) == pytest.approx(predicted, rel=0.35), site


def test_sensitivity_does_not_depend_on_batching_or_layout() -> None:
    """Batch size does not matter, gradients and requires_grad stay, and per-expert modules use the same site names."""
    model = qwen3(dtype=torch.float32)
    one = sensitivities(model, PROMPTS, COMPLETIONS, contract=ALL_LINEARS, batch_size=1)
    three = sensitivities(model, PROMPTS, COMPLETIONS, contract=ALL_LINEARS, batch_size=3)
    assert one.keys() == three.keys()
    # One backward pass per batch sums over its own sequences only, which never see each other.
    assert all(one[n] == pytest.approx(three[n], rel=1e-3) for n in one)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    prepare_qat(model, ALL_LINEARS)
    quantized = sensitivities(model, PROMPTS, COMPLETIONS)
    assert quantized.keys() == one.keys()
    assert quantized != one
    per_expert = PerExpertModel()
    sites = {"model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2"}
    assert sensitivities(per_expert, PROMPTS, COMPLETIONS, contract=Contract()).keys() == sites
    with pytest.raises(QuadsError, match="hold no token"):
        sensitivities(model, [[1]], [[]])


@pytest.mark.parametrize("prepared", [False, True])
def test_observed_experts_compute_what_the_model_computes(prepared: bool) -> None:
    """The observing implementation gives the model's own log-probs, and is gone afterwards."""
    model = qwen3(dtype=torch.float32)
    if prepared:
        prepare_qat(model)
    expected = log_prob(model)
    seen: list[Pass] = []
    with observing(model, Contract(), seen.append):
        torch.testing.assert_close(log_prob(model), expected)
    assert {p.site.name.rpartition(".")[2] for p in seen} == {"w13", "w2"}
    assert all(p.expert is not None and p.y.shape[0] == p.expert.numel() for p in seen)
    assert log_prob(model) == expected
    assert model.config._experts_implementation == ("quads_qat" if prepared else "grouped_mm")


def test_site_names() -> None:
    """Sites are those of the compensation state, for fused, per-expert and dense weights."""
    for name, site in {
        "model.layers.3.mlp.experts.gate_up_proj": "model.layers.3.mlp.experts.w13",
        "model.layers.3.block_sparse_moe.experts.7.w3.weight": "model.layers.3.mlp.experts.w13",
        "model.layers.3.mlp.experts.7.down_proj": "model.layers.3.mlp.experts.w2",
        "model.layers.3.self_attn.k_proj": "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.mlp.shared_experts.up_proj": "model.layers.3.mlp.shared_experts.gate_up_proj",
        "model.layers.3.mlp.down_proj": "model.layers.3.mlp.down_proj",
    }.items():
        assert site_of(name).name == site


def test_calibration_finds_outlier_blocks_and_the_centre() -> None:
    """A channel of large, offset inputs is centred, and a channel of large spread gets its block compensated."""
    model = qwen3()
    norm = model.model.layers[0].post_attention_layernorm
    with torch.no_grad():
        norm.weight[37] = 30.0
    contract = Contract().merged({"compensation": {"ratio": 0.25, "allocation": "uniform"}})
    state = calibrate(model, [tokens(4, 32), tokens(4, 32, seed=2)], contract)
    assert state.sites.keys() == {f"model.layers.{i}.mlp.experts.{w}" for i in range(2) for w in ("w13", "w2")}
    w13, w2 = (state.sites[f"model.layers.0.mlp.experts.{w}"] for w in ("w13", "w2"))
    assert w13.blocks.shape == (1, 4)
    assert w2.blocks.shape == (4, 2)
    assert w13.blocks[0].tolist() == [False, False, True, False]  # channel 37 lies in block 2
    inputs = []
    with torch.no_grad(), observing(model, contract, lambda p: inputs.append(p.x) if "0" in p.site.name else None):
        model(input_ids=tokens(4, 32, seed=2))
    x = inputs[0].float()
    plain = x - quantize_with_residual(x).main.dequantize()
    centred = x - w13.center - quantize_with_residual(x, center=w13.center).main.dequantize()
    assert centred.square().sum() < plain.square().sum()
    assert bool((w2.center == 0).all())


def test_calibration_is_the_same_for_every_layout() -> None:
    """Per-expert modules and dense linears get sites and budgets too; sensitivities move the budget."""
    contract = ALL_LINEARS
    model = qwen3()
    prepare_qat(model, contract)
    weights = sensitivities(model, PROMPTS, COMPLETIONS)
    state = calibrate(model, [tokens(2, 32)], sensitivities=weights)
    assert state.sites.keys() == SITES
    assert state.sensitivities == weights
    assert state.sites["model.layers.0.self_attn.qkv_proj"].blocks.shape == (1, 4)
    flipped = calibrate(model, [tokens(2, 32)], sensitivities={n: 1 / v for n, v in weights.items()})
    assert flipped.fingerprint() != state.fingerprint()
    old = calibrate(PerExpertModel(), [tokens(2, 32)], Contract())
    assert old.sites["model.layers.0.mlp.experts.w2"].blocks.shape == (4, 2)
    with pytest.raises(ContractError, match="only 'w4a4'"):
        calibrate(PerExpertModel(), [tokens()], Contract(scheme=Scheme.W4A16))
    with pytest.raises(QuadsError, match="no calibration token"):
        calibrate(PerExpertModel(), [], Contract())


def test_scores_are_right_at_every_position_and_do_not_depend_on_padding() -> None:
    """Row t predicts completion token t, float32, normalised, equal for any batch; prompts may have any length."""
    model = qwen3(dtype=torch.float32)
    batched = score(model, PROMPTS, COMPLETIONS)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        alone = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
        assert batched[i].shape == (len(completion), 128)
        assert batched[i].dtype == torch.float32
        torch.testing.assert_close(batched[i], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batched[i].exp().sum(dim=-1), torch.ones(len(completion)))
    picked = token_log_probs(batched, COMPLETIONS)
    assert picked[1][3] == batched[1][3, 7]
    prepare_qat(model)
    quantized = score(model, PROMPTS, COMPLETIONS)
    with qat_disabled(model):
        plain = score(model, PROMPTS, COMPLETIONS)
    assert torch.equal(plain[0], batched[0])
    assert not torch.equal(quantized[0], batched[0])
    with pytest.raises(QuadsError, match="prompt 1 is empty"):
        score(model, [[1], []], [[2], [3]])
