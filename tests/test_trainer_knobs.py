# SPDX-License-Identifier: Apache-2.0
"""Knobs of the trainer: schedule, global scales that are kept, gradients, kept layers, and the W4A4 ablation arm."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from fake_engine import FakeEngine
from safetensors.torch import load_file
from torch import nn
from trainer_models import ALL_LINEARS, PerExpertModel, qwen3, single_thread, tokens  # noqa: F401

from trainer_qat import (
    RolloutSync,
    Schedule,
    export_checkpoint,
    follow_optimizer,
    load_qat_state_dict,
    prepare_qat,
    qat_disabled,
    qat_state_dict,
    qat_step,
)
from trainer_qat.ablation import fake_quantize_activation
from trainer_qat.fake_quant import representable
from trainer_qat.prepare import FROZEN_FILE, expert_weights, quantizers_of
from vllm_quads.checkpoint import quantize_checkpoint
from vllm_quads.nvfp4 import (
    Contract,
    ContractError,
    PackedTensor,
    Scheme,
    WeightGlobalScale,
    fake_quantize_weight,
    quantize_activation,
    weight_amax,
)

AVERAGE = Contract(targets=ALL_LINEARS.targets, weight_global_scale=WeightGlobalScale.MOVING_AVERAGE)
FROZEN = Contract(targets=ALL_LINEARS.targets, weight_global_scale=WeightGlobalScale.FROZEN)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Loss of one batch."""
    return model(tokens(), labels=tokens()).loss


def down(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(master, multiplied) weight of one expert stack."""
    experts = model.model.layers[0].mlp.experts
    return experts.down_proj, expert_weights(experts)[1]


# --- schedule --------------------------------------------------------------------------------------------------------


def test_strength_of_a_schedule() -> None:
    """0 before the start, then a straight line to 1 over the ramp."""
    assert [Schedule(2, 4).strength(i) for i in range(8)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [Schedule(1).strength(i) for i in range(3)] == [0, 1, 1]
    for bad in ({"start": -1}, {"ramp": 1.5}, {"start": True}):
        with pytest.raises(ContractError, match=f"schedule.{next(iter(bad))}: is"):
            Schedule(**bad)
    with pytest.raises(ContractError, match="schedule: is dict"):
        prepare_qat(qwen3(), schedule={"start": 1})


@pytest.mark.parametrize("clamp", [False, True])
def test_ramp_interpolates_from_the_plain_to_the_quantized_weight(clamp: bool) -> None:
    """w + a (qdq(w) - w) at every step, exact at both ends; the gradient is straight-through at any strength.

    A block scale that was rounded down saturates its block's largest element, live scales or not: 1 - a with a clamp.
    """
    model = qwen3(dtype=torch.float32)
    plain = loss_of(model)
    prepare_qat(model, ALL_LINEARS, schedule=Schedule(start=1, ramp=2), clamp_gradient=clamp)
    assert loss_of(model) == plain
    for strength in (0.5, 1.0, 1.0):
        qat_step(model)
        master, used = down(model)
        expected = master + strength * (fake_quantize_weight(master) - master)
        torch.testing.assert_close(used, expected, rtol=1e-6, atol=1e-7)
        grad = torch.autograd.grad(used.sum(), master)[0]
        inside = representable(master, weight_amax(master)) if clamp else torch.ones_like(grad, dtype=torch.bool)
        assert torch.equal(grad, torch.where(inside, 1.0, 1.0 - strength))
        assert inside.float().mean() > 0.9
    assert torch.equal(used, fake_quantize_weight(master))


def test_clamp_gradient_on_a_ramp() -> None:
    """Where a frozen scale saturates, the gradient is 1 - a, of the strength at the forward pass."""
    model = qwen3()
    contract = Contract(weight_global_scale=WeightGlobalScale.FROZEN)
    prepare_qat(model, contract, schedule=Schedule(ramp=4), clamp_gradient=True)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[0, 0, 0] = 100.0
    master, used = down(model)
    qat_step(model)  # the backward pass belongs to the forward pass before
    grad = torch.autograd.grad(used.sum(), master)[0]
    assert grad[0, 0, 0] == 0.75
    assert grad[1, 0, 0] == 1


def test_optimizer_drives_the_schedule() -> None:
    """`follow_optimizer` counts optimizer steps, not micro-batches, looks through wrappers, and stops when told to."""

    class Accelerated:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = qwen3()
    prepare_qat(model, schedule=Schedule(start=1, ramp=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = follow_optimizer(model, Accelerated(optimizer))
    steps = []
    for _ in range(2):
        for _ in range(2):
            loss_of(model).backward()
            steps.append(int(qat_state_dict(model)["step"]))
        optimizer.step()
    assert steps == [0, 0, 1, 1]
    handle.remove()
    optimizer.step()
    assert int(qat_state_dict(model)["step"]) == 2
    with pytest.raises(ContractError, match="no fake quantization"):
        follow_optimizer(qwen3(), optimizer)


def test_forgotten_steps_are_told_of() -> None:
    """A schedule or an average that nobody drives would silently never move: a warning, once, and only then."""
    model, quiet = qwen3(), qwen3()
    prepare_qat(model, AVERAGE)
    prepare_qat(quiet, AVERAGE)
    optimizer, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(quiet.parameters())
    follow_optimizer(quiet, other)
    model(tokens())
    optimizer.step()
    other.step()
    with pytest.warns(UserWarning, match="optimizer steps without a qat_step"):
        model(tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens())
        quiet(tokens())


@pytest.mark.parametrize("scale", [WeightGlobalScale.LIVE, WeightGlobalScale.MOVING_AVERAGE])
def test_compiled_model_follows_the_schedule_and_the_scales(scale: WeightGlobalScale) -> None:
    """One compiled function sees every strength of a ramp and every scale, with one graph per phase (off, ramp, on)."""
    model = PerExpertModel()
    prepare_qat(model, Contract(weight_global_scale=scale), schedule=Schedule(start=1, ramp=4), scale_decay=0.5)
    linear = model.model.layers[0].block_sparse_moe.experts[0].w2
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda: linear.quads_weight * 1.0, fullgraph=True, backend=backend)
    for _ in range(7):
        assert torch.equal(compiled(), linear.quads_weight)
        with torch.no_grad():
            linear.weight.mul_(1.1)
        qat_step(model)
    assert len(graphs) == 3


# --- global scales ---------------------------------------------------------------------------------------------------


def test_moving_average_follows_slowly_and_is_what_the_rollout_gets(tmp_path: Path) -> None:
    """a <- d a + (1 - d) amax per optimizer step, shared by siblings; forward, push and export use that scale."""
    model = qwen3(dtype=torch.float32)
    report = prepare_qat(model, AVERAGE, scale_decay=0.75)
    assert "moving average, decay 0.75" in str(report)
    experts, attention = model.model.layers[0].mlp.experts, model.model.layers[0].self_attn
    before = weight_amax(experts.down_proj)
    qkv = torch.stack([weight_amax(m.weight) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]).amax()
    with torch.no_grad():
        experts.down_proj.mul_(2)
        attention.k_proj.weight[0, 0] = 9.0
    assert torch.equal(down(model)[1], fake_quantize_weight(experts.down_proj, amax=before))
    qat_step(model)
    average = 0.75 * before + 0.25 * weight_amax(experts.down_proj)
    assert torch.equal(down(model)[1], fake_quantize_weight(experts.down_proj, amax=average))
    q = attention.q_proj
    assert torch.equal(q.quads_weight, fake_quantize_weight(q.weight, amax=0.75 * qkv + 0.25 * 9.0))

    engine = FakeEngine(AVERAGE, report.quantized)
    sync = RolloutSync(model, engine)
    fingerprint = sync.push().fingerprint
    name = "model.layers.0.mlp.experts.down_proj.weight_scale_2"
    assert torch.equal(engine.serving[name], PackedTensor.quantize(experts.down_proj, amax=average).decode_scale)
    with pytest.raises(ContractError, match="an engine cannot know moving_average scales"):
        sync.push(packed=False)
    assert export_checkpoint(model, tmp_path / "out").fingerprint == fingerprint


def test_a_run_resumes_with_its_scales_and_its_schedule(tmp_path: Path) -> None:
    """qat_state_dict brings a new process to the same bytes and strength; so do an export's scales."""
    model = qwen3()
    prepare_qat(model, AVERAGE, scale_decay=0.9, schedule=Schedule(ramp=8))
    for factor in (1.5, 0.5, 3.0):
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj.mul_(factor)
        qat_step(model)
    expected = loss_of(model)
    exported = export_checkpoint(model, tmp_path / "out")

    other = qwen3()
    other.load_state_dict(model.state_dict())
    prepare_qat(other, AVERAGE, scale_decay=0.9, schedule=Schedule(ramp=8))
    assert loss_of(other) != expected
    load_qat_state_dict(other, qat_state_dict(model))
    assert loss_of(other) == expected
    third = qwen3()
    third.load_state_dict(model.state_dict())
    prepare_qat(third, AVERAGE, frozen_from=tmp_path / "out")
    assert RolloutSync(third, None).payload.fingerprint() == exported.fingerprint

    state = qat_state_dict(model)
    plain = qwen3()
    prepare_qat(plain)
    with pytest.raises(ContractError, match="only the given state has 'amax.model.layers.0"):
        load_qat_state_dict(plain, state)
    name = "amax.model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ContractError, match=r"down_proj is torch.float32 \(3,\), expected torch.float32 \(4,\)"):
        load_qat_state_dict(other, state | {name: state[name][:3]})


@pytest.mark.parametrize("contract", [FROZEN, AVERAGE])
def test_scales_of_a_quantized_base_checkpoint(contract: Contract, tmp_path: Path) -> None:
    """A checkpoint of `quads quantize`, which has no amax file, gives its scales exactly: zero experts included."""
    model = qwen3()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2] = 0
    model.save_pretrained(tmp_path / "bf16")
    base = quantize_checkpoint(tmp_path / "bf16", tmp_path / "base", contract=contract)
    assert not (tmp_path / "base" / FROZEN_FILE).exists()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    prepare_qat(model, contract, frozen_from=tmp_path / "base")
    fingerprint = RolloutSync(model, None).payload.fingerprint()
    assert fingerprint != base.fingerprint
    export_checkpoint(model, tmp_path / "again")
    a, b = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "again"))
    scales = [n for n in a if n.endswith("weight_scale_2")]
    assert len(scales) == 2 * (12 + 4)
    assert all(torch.equal(a[n], b[n]) for n in scales)


def test_checkpoints_that_cannot_give_scales(tmp_path: Path) -> None:
    """BF16 or foreign checkpoints, and another set of quantized weights, are refused by name."""
    model = qwen3()
    model.save_pretrained(tmp_path / "bf16")
    with pytest.raises(ContractError, match="frozen_from: .*bf16 is a bf16 checkpoint, expected a `quads` one"):
        prepare_qat(model, FROZEN, frozen_from=tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "experts", contract=Contract())
    with pytest.raises(ContractError, match=r"frozen_from: model.layers.0.self_attn.q_proj is not in NVFP4"):
        prepare_qat(model, FROZEN, frozen_from=tmp_path / "experts")
    with pytest.raises(ContractError, match='frozen_from: needs weight_global_scale "frozen" or'):
        prepare_qat(model, ALL_LINEARS, frozen_from=tmp_path / "experts")
    with pytest.raises(ContractError, match="scale_decay: is 1.0"):
        prepare_qat(model, AVERAGE, scale_decay=1.0)
    assert not list(quantizers_of(model))


# --- ablation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [qwen3, PerExpertModel])
def test_symmetric_ablation_quantizes_activations_too(make: object) -> None:
    """Both GEMMs of experts and every linear see Q(x), gradients reach all parameters, and the report says so."""
    contract = Contract() if make is PerExpertModel else ALL_LINEARS
    asymmetric, model = make(), make()  # type: ignore[operator]
    prepare_qat(asymmetric, contract)
    report = prepare_qat(model, contract, w4a4_ablation=True)
    assert "ABLATION" in str(report)
    ids = tokens()
    a, b = asymmetric(ids).logits, model(ids).logits
    assert not torch.equal(a, b)
    b.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in model.parameters())
    with qat_disabled(model), qat_disabled(asymmetric):
        assert torch.equal(asymmetric(ids).logits, model(ids).logits)


@torch.no_grad()
def test_ablation_numbers() -> None:
    """An expert layer equals the two GEMMs on quantized operands, written out; a linear likewise."""
    model = qwen3(dtype=torch.float32)
    prepare_qat(model, ALL_LINEARS, w4a4_ablation=True)
    experts, linear = model.model.layers[0].mlp.experts, model.model.layers[0].self_attn.o_proj
    torch.manual_seed(1)
    x = torch.randn(5, 64)
    rule = ALL_LINEARS.activation.block_scale_rule

    def q(t: torch.Tensor) -> torch.Tensor:
        return quantize_activation(t, rule=rule).dequantize()

    torch.testing.assert_close(linear(x), q(x) @ fake_quantize_weight(linear.weight).T)
    gate_up, down_proj = expert_weights(experts)
    index, weight = torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    want = torch.zeros(5, 64)
    for e in (0, 3):
        gate, up = (q(x) @ gate_up[e].T).chunk(2, dim=-1)
        want += 0.5 * q(nn.functional.silu(gate) * up) @ down_proj[e].T
    torch.testing.assert_close(experts(x, index, weight), want)
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        fake_quantize_activation(y, ALL_LINEARS).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y))


def test_ablation_needs_quantized_activations() -> None:
    """A weight-only contract and static input scales leave nothing to compare with."""
    with pytest.raises(ContractError, match="w4a4_ablation: needs scheme 'w4a4'"):
        prepare_qat(qwen3(), Contract(scheme=Scheme.W4A16), w4a4_ablation=True)
    static = Contract().merged({"activation": {"global_scale": "static"}})
    with pytest.raises(ContractError, match="no static input scales"):
        prepare_qat(qwen3(), static, w4a4_ablation=True)
