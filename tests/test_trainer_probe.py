# SPDX-License-Identifier: Apache-2.0
"""The layer probe: emulated rollout numerics are the reference's, and errors are put down to the right layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_models import ALL_LINEARS, PerExpertModel, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import calibrate, plot_mismatch, prepare_qat, probe_layers
from trainer_qat.emulate import emulated_rollout
from trainer_qat.mismatch import selective_log_softmax
from vllm_quads.compensation import linear_forward, merged, prepare_matrix, quantize_with_residual
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor, QuadsError, weight_amax

PLAIN = ALL_LINEARS.merged({"compensation": {"form": "none"}, "activation": {"centering": "none"}})
ROWS = ALL_LINEARS.merged({"compensation": {"form": "rows"}})


def log_probs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first."""
    with torch.no_grad():
        return selective_log_softmax(model(ids).logits[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("prepared", [False, True])
def test_weight_only_emulation_is_the_prepared_model(prepared: bool) -> None:
    """Without activation quantization, emulating the rollout gives what the QAT forward gives, in FP32 to rounding:
    two implementations of the weights agree, with and without prepare_qat, and in every layout."""
    contract = ALL_LINEARS.merged({"scheme": "w4a16"})
    for make in (lambda: qwen3(dtype=torch.float32), PerExpertModel):
        own = Contract().merged({"scheme": "w4a16"}) if make is PerExpertModel else contract
        model, reference = make(), make()
        plain = log_probs(model, tokens())
        prepare_qat(reference, own)
        if prepared:
            prepare_qat(model, own)
        with emulated_rollout(model, own):
            torch.testing.assert_close(log_probs(model, tokens()), log_probs(reference, tokens()), rtol=0, atol=2e-5)
        assert torch.equal(log_probs(model, tokens()), log_probs(reference, tokens()) if prepared else plain)


def test_emulated_gemms_are_the_references() -> None:
    """A linear and both expert GEMMs with calibrated blocks and centring, bit by bit (linear) and written out (w2)."""
    model = qwen3()
    contract = ALL_LINEARS.merged({"compensation": {"ratio": 0.5, "form": "blocks"}})
    prepare_qat(model, contract)
    state = calibrate(model, [tokens(2, 32)])
    torch.manual_seed(3)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    attention, experts = model.model.layers[1].self_attn, model.model.layers[1].mlp.experts
    amax = torch.stack([weight_amax(m.weight) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]).amax()
    packed = PackedTensor.quantize(attention.k_proj.weight, amax=amax)
    site = state.sites["model.layers.1.self_attn.qkv_proj"]
    matrix = prepare_matrix(packed.scaled(), packed.decode_scale.expand(32), site.blocks[0], site.center)
    index, weight = torch.tensor([[2, 0]] * 5), torch.full((5, 2), 0.5)
    with torch.no_grad(), emulated_rollout(model, compensation=state):
        assert torch.equal(attention.k_proj(x), linear_forward(x, matrix, contract, site=site))
        got = experts(x, index, weight)
    want = torch.zeros(5, 64)
    rule = contract.activation.block_scale_rule
    w13, w2 = (state.sites[f"model.layers.1.mlp.experts.{part}"] for part in ("w13", "w2"))

    def operand(x: torch.Tensor, center: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        c = quantize_with_residual(x, rule=rule, center=center)
        return merged(c, blocks, torch.float32) * c.main.decode_scale + center

    for e in (2, 0):
        gate_up, down = (PackedTensor.quantize(p[e]).dequantize() for p in (experts.gate_up_proj, experts.down_proj))
        gate, up = (operand(x, w13.center, w13.blocks[0]) @ gate_up.T).chunk(2, dim=-1)
        h = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        want += 0.5 * operand(h, torch.zeros(32), w2.blocks[e]) @ down.T
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_errors_are_put_down_to_the_layer_that_makes_them() -> None:
    """With layer 0 in BF16, all of the gap is layer 1's; with both, isolated errors do not contain those before."""
    ids = tokens(3, 24)
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, PLAIN.merged({"keep_first_layers": 1}))
    probe = probe_layers(model, ids, gaps=True)
    first, last = probe.rows
    assert (first.layer, first.isolated, first.accumulated, first.mean_gap, first.rerouted) == (0, 0, 0, 0, 0)
    assert last.isolated == last.accumulated > 0.01
    assert last.mean_gap == probe.report.mean_gap > 0.01
    assert torch.equal(log_probs(model, ids), probe.trainer)

    both = qwen3(dtype=torch.float32)
    prepare_qat(both, PLAIN)
    probe = probe_layers(both, ids, gaps=True)
    first, last = probe.rows
    assert first.isolated == first.accumulated > 0.01
    assert last.accumulated > 1.2 * last.isolated > 0
    assert last.rerouted > 0
    assert "all layers: mean |gap|" in str(probe)
    rows = probe_layers(both, ids, contract=ROWS)
    assert rows.rows[-1].accumulated < 0.2 * last.accumulated  # compensation of everything
    logged = probe.to_dict()
    assert logged["probe/layer_001/isolated"] == last.isolated
    assert logged["probe/sampling_logp_difference/mean"] == probe.report.mean_gap
    assert all(isinstance(v, float) for v in logged.values())


def test_padding_does_not_count() -> None:
    """A right-padded batch gives the errors and gaps of its sequences without padding."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, PLAIN)
    ids = tokens(1, 20)
    padded = torch.cat((ids, torch.full((1, 6), 5)), dim=1)
    mask = (torch.arange(26) < 20).long()[None]
    alone, batched = probe_layers(model, ids), probe_layers(model, padded, mask)
    assert batched.report.tokens == 19
    for a, b in zip(alone.rows, batched.rows, strict=True):
        assert b.isolated == pytest.approx(a.isolated, rel=1e-3)
        assert b.accumulated == pytest.approx(a.accumulated, rel=1e-3)
    assert batched.report.max_gap == pytest.approx(alone.report.max_gap, rel=1e-2)


def test_decode_tokens_get_full_compensation() -> None:
    """Form.AUTO: tokens that were decoded one by one are compensated in full, prefilled ones by selected blocks."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, ALL_LINEARS)
    ids = tokens(2, 20)
    auto, none = probe_layers(model, ids), probe_layers(model, ids, decode=False)
    half = torch.zeros(2, 20, dtype=torch.bool)
    half[1] = True
    mixed = probe_layers(model, ids, decode=half)
    assert auto.report.mean_gap < 0.5 * none.report.mean_gap
    assert torch.equal(mixed.rollout[1], auto.rollout[1])
    torch.testing.assert_close(mixed.rollout[0], none.rollout[0], rtol=0, atol=1e-4)


def test_the_model_is_as_it_was_also_after_a_failure() -> None:
    """Hooks, implementation and numbers are gone; wrong arguments are named."""
    model = qwen3()
    prepare_qat(model, ALL_LINEARS)
    before = log_probs(model, tokens())
    with pytest.raises(QuadsError, match="decode: has 3 tokens, but a quantized linear sees 24 rows"):
        probe_layers(model, tokens(), decode=torch.ones(3, dtype=torch.bool))
    assert model.config._experts_implementation == "quads_qat"
    assert torch.equal(log_probs(model, tokens()), before)
    assert not [m for m in model.modules() if m._forward_hooks]
    with pytest.raises(QuadsError, match=r"input_ids have shape \(24,\)"):
        probe_layers(model, tokens().flatten())
    with pytest.raises(QuadsError, match=r"attention_mask has shape \(2, 11\), expected that of input_ids, \(2, 12\)"):
        probe_layers(model, tokens(), torch.ones(2, 11))
    with pytest.raises(QuadsError, match="attention_mask leaves no two tokens in a row"):
        probe_layers(model, tokens(), torch.zeros(2, 12))
    with pytest.raises(QuadsError, match="decoder layer 0 is no module that is called"):
        probe_layers(PerExpertModel(), tokens(), contract=Contract())
    with pytest.raises(ContractError, match="is 'static'"):
        probe_layers(model, tokens(), contract=ALL_LINEARS.merged({"activation": {"global_scale": "static"}}))


def test_picture(tmp_path: Path) -> None:
    """A file and a figure with gaps, probabilities and, with a probe, layers; no token is an error."""
    model = qwen3()
    prepare_qat(model, PLAIN)
    probe = probe_layers(model, tokens())
    figure = plot_mismatch(probe.trainer, probe.rollout, probe.mask, probe=probe, path=tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")
    assert [a.get_title() for a in figure.axes] == ["Gaps", "Sampled tokens", "Where it enters"]
    assert sum(p.get_height() for p in figure.axes[0].patches) == probe.report.tokens
    assert len(plot_mismatch(probe.trainer, probe.rollout).axes) == 2
    with pytest.raises(QuadsError, match="no token"):
        plot_mismatch(probe.trainer, probe.rollout, torch.zeros_like(probe.mask))
