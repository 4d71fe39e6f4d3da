# SPDX-License-Identifier: Apache-2.0
"""The seam between plugin and Hopper kernels, without a GPU: what the kernels are given, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rac_data import Layer
from torch import nn

pytest.importorskip("vllm")

from vllm_quads.compensation import SiteState, SiteStatistics
from vllm_quads.kernels.layout import unarrange
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor, Scheme
from vllm_quads.plugin import compat, config, hopper
from vllm_quads.plugin.backend_choice import BackendChoice
from vllm_quads.plugin.backends import ExpertsRequest, LinearRequest, TorchExperts, TorchLinear
from vllm_quads.plugin.hopper import HopperExperts, HopperLinear
from vllm_quads.plugin.loading import PackedLoader
from vllm_quads.plugin.parameters import Matrix, Role, add_parameters
from vllm_quads.plugin.runtime import LayerRuntime, SiteSpec

EXPERTS, HIDDEN, INTER, TOKENS = 2, 64, 48, 5
MAP = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)


def request_of(contract: Contract) -> ExpertsRequest:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, 4, (TOKENS, 2), generator=generator, dtype=torch.int32)
    ids[0, 1] = -1
    w13 = SiteState(torch.linspace(-1, 1, HIDDEN), torch.tensor([[True, False, True, False]]))
    weights = torch.rand(TOKENS, 2, generator=generator)
    return ExpertsRequest(x, weights, ids, contract, w13, SiteState.empty(INTER, EXPERTS), expert_map=MAP)


def test_kernels_get_global_ids_and_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels map expert ids themselves (they plan from the number of all experts), and what a captured graph reads
    is written in place when weights change."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        hopper, "quads_moe", lambda x, moe, w, ids, **k: calls.append({"moe": moe, "ids": ids, **k}) or x
    )
    backend = HopperExperts()
    request = request_of(Contract())
    for seed in (0, 7):
        layer = Layer(EXPERTS, HIDDEN, INTER, seed)
        backend.prepare(layer.w13, layer.w2, request.w13_site, request.w2_site)
        backend.forward(request)
    first, second = calls
    assert first["expert_map"] is MAP
    assert torch.equal(first["ids"], request.topk_ids)
    compensation = second["compensation"]
    assert compensation.full_all
    assert compensation.center13.data_ptr() == request.w13_site.center.data_ptr()
    assert compensation.bias13.data_ptr() == first["compensation"].bias13.data_ptr()
    by_chunk = compensation.center13_by_chunk
    assert by_chunk.data_ptr() == first["compensation"].center13_by_chunk.data_ptr()
    assert torch.equal(by_chunk.view(4, -1, 4).transpose(0, 1).reshape(-1), request.w13_site.center)
    assert first["moe"].w13.data_ptr() == second["moe"].w13.data_ptr()
    reference = TorchExperts()
    reference.prepare(layer.w13, layer.w2, request.w13_site, request.w2_site)
    assert reference._prepared is not None
    expected = torch.stack([m.bias for m in reference._prepared.w13])  # type: ignore[misc]
    torch.testing.assert_close(compensation.bias13, expected)


@pytest.mark.parametrize("scheme", [Scheme.W4A16, Scheme.W4A4])
def test_reference_of_what_the_kernels_do_not_compute(scheme: Scheme) -> None:
    """float32 activations take the reference, with every token's full residual as the kernels give it."""
    request = request_of(Contract().merged({"scheme": scheme.value}))
    request = replace(
        request, x=request.x.to(torch.float32), decode=torch.ones(TOKENS, dtype=torch.bool), router_on_input=False
    )
    layer, outputs = Layer(EXPERTS, HIDDEN, INTER), []
    for backend in (HopperExperts(), TorchExperts()):
        backend.prepare(layer.w13, layer.w2, request.w13_site, request.w2_site)
        outputs.append(backend.forward(request))
    assert torch.equal(*outputs)


def test_w4a16_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquantized activations run on the same kernels, without compensation and centring."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(hopper, "quads_moe", lambda x, moe, w, ids, **k: calls.append(k) or x)
    monkeypatch.setattr(hopper, "quads_linear", lambda x, linear, **k: calls.append(k) or x)
    request = request_of(Contract().merged({"scheme": "w4a16"}))
    layer, backend = Layer(EXPERTS, HIDDEN, INTER), HopperExperts()
    backend.prepare(layer.w13, layer.w2, request.w13_site, request.w2_site)
    backend.forward(request)
    weight = PackedTensor.quantize(torch.randn(32, HIDDEN))
    linear = HopperLinear()
    linear.prepare([weight], request.w13_site)
    linear.forward(LinearRequest(request.x, request.contract, request.w13_site))
    for call in calls:
        assert not call["quantized"]
        assert not call["compensation"].full_all
    assert calls[0]["compensation"].bias13 is None
    assert calls[1]["compensation"].bias is None


def test_linear_kernels_get_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v are one matrix with a scale per channel; what a captured graph reads is written in place at a refit."""
    calls: list[Any] = []
    monkeypatch.setattr(hopper, "quads_linear", lambda x, linear, **k: calls.append((linear, k)) or x)
    site = SiteState(torch.linspace(-1, 1, HIDDEN), torch.tensor([[True, False, True, False]]))
    backend, reference = HopperLinear(), TorchLinear()
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        parts = [PackedTensor.quantize(torch.randn(n, HIDDEN, generator=generator)) for n in (32, 16, 16)]
        backend.prepare(parts, site)
        reference.prepare(parts, site)
        backend.forward(LinearRequest(torch.zeros(3, HIDDEN, dtype=torch.bfloat16), Contract(), site))
    (first, one), (second, two) = calls
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert one["compensation"].bias.data_ptr() == two["compensation"].bias.data_ptr()
    assert reference._prepared is not None
    assert torch.equal(second.decode, reference._prepared.decode)
    torch.testing.assert_close(two["compensation"].bias, reference._prepared.bias)
    codes, _ = unarrange(second.weight, 64, HIDDEN, gate_up=False)
    assert torch.equal(codes[0], torch.cat([p.codes for p in parts]))
    # float32 activations and statistics take the reference
    x = torch.randn(3, HIDDEN, generator=generator)
    wanted = reference.forward(LinearRequest(x, Contract(), site, decode=torch.ones(3, dtype=torch.bool)))
    assert torch.equal(backend.forward(LinearRequest(x, Contract(), site)), wanted)


def test_buffers_survive_the_loss_of_their_contents() -> None:
    """Sleep level 2 drops whatever was allocated while the model was loaded: the next `prepare` writes all of it."""
    site, other = SiteState(torch.zeros(HIDDEN), torch.zeros(1, 4, dtype=torch.bool)), SiteState.empty(INTER, EXPERTS)
    layer = Layer(EXPERTS, HIDDEN, INTER)
    parts = [PackedTensor.quantize(torch.randn(32, HIDDEN))]

    def buffers(*owners: Any) -> list[torch.Tensor]:
        """All tensors of these objects and of those that they hold, but for the weights that `prepare` was given."""
        found = [v for owner in owners for k, v in sorted(vars(owner).items()) if k != "_parts"]
        inner = [v for v in found if hasattr(v, "__dict__") and not isinstance(v, torch.Tensor)]
        return [v for v in found if isinstance(v, torch.Tensor)] + (buffers(*inner) if inner else [])

    experts, linear, lost = HopperExperts(), HopperLinear(), False
    for _ in range(2):
        if lost:
            for tensor in buffers(experts, linear):
                tensor.fill_(77)
            experts.forget()
            linear.forget()
        experts.prepare(layer.w13, layer.w2, site, other, centered=False)
        linear.prepare(parts, site, centered=False)
        if not lost:
            expected, lost = [t.clone() for t in buffers(experts, linear)], True
    assert len(expected) >= 9
    assert all(torch.equal(a, b) for a, b in zip(buffers(experts, linear), expected, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "dtype", "why"),
    [
        ("torch", {}, torch.bfloat16, "no nvcc"),
        ("hopper", {"scheme": "w4a16"}, torch.bfloat16, None),
        ("hopper", {}, torch.float32, "float32"),
        ("hopper", {}, torch.bfloat16, None),
    ],
)
def test_reference_is_never_captured(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference counts tokens on the host and moves its operands at a refit, which no CUDA graph survives: the
    start says so and what to do."""
    monkeypatch.setattr(config, "choose_backend", lambda device: BackendChoice(name, "no nvcc"))
    quads = config.QuadsConfig()
    quads._contract, quads._act_dtype = Contract().merged(options), dtype
    quads._refuse_to_capture_reference("model.layer")  # an eager engine captures nothing
    quads._captures = True
    if why is None:
        quads._refuse_to_capture_reference("model.layer")
        return
    with pytest.raises(ContractError, match=rf"model.layer: .*{why}.*enforce_eager"):
        quads._refuse_to_capture_reference("model.layer")


def test_captured_options_cannot_change() -> None:
    """A captured graph would replay the old options: refused, not ignored. Statistics are gathered inside of graphs
    on request, where the contract has a use for them."""
    quads = config.QuadsConfig()
    quads._contract, quads._captures = Contract(), True
    quads.replace_contract(Contract())
    quads.collect(False)
    with pytest.raises(ContractError, match="without additional_config={'quads_statistics': True}"):
        quads.collect(True)
    quads._graph_statistics = True
    quads.collect(True)
    with pytest.raises(ContractError, match="enforce_eager=True"):
        quads.replace_contract(Contract().merged({"compensation": {"form": "none"}}))
    assert quads.contract == Contract()
    quads._contract = Contract().merged({"activation": {"centering": "none"}, "compensation": {"form": "rows"}})
    with pytest.raises(ContractError, match="neither appended blocks nor centring"):
        quads.collect(True)


def test_statistics_of_captured_graphs_have_a_switch_and_fixed_buffers() -> None:
    """Accumulators that graphs hold are allocated once, are buffers (sleep mode saves those) but no part of a state
    dict, and are switched on and off on the device."""
    sites = [SiteSpec("a.w13", "w13", 64, 1, 64, 0, 1, (0,)), SiteSpec("a.w2", "w2", 48, 2, 48, 0, 2, (0, 1))]
    host = SimpleNamespace(contract=Contract())
    runtime = LayerRuntime(host, nn.Module(), PackedLoader(nn.Module(), [], str), sites)  # type: ignore[arg-type]
    assert runtime.gathering("a.w13") is None
    runtime.gather_in_graphs()
    held = [runtime.gathering(site.name) for site in sites]
    switches = [statistics.paused for statistics in held if statistics is not None]
    assert [int(s) for s in switches] == [1, 1]
    for on in (True, False):
        runtime.collect(on)
        runtime.reset_statistics()
        runtime.gather_in_graphs()
        assert [int(s) for s in switches] == [not on, not on]
        assert [runtime.gathering(site.name) for site in sites] == held
    buffers = dict(runtime.named_buffers())
    for site, statistics in zip(sites, held, strict=True):
        assert statistics is not None
        assert buffers[f"{site.key}_statistics_energy"].data_ptr() == statistics.energy.data_ptr()
        assert f"{site.key}_statistics_rows" in buffers
    assert not runtime.state_dict()


def test_kernels_gather_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """While statistics are gathered the fused kernels still run, and get the accumulators and the number of tokens."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(hopper, "quads_moe", lambda x, moe, w, ids, **k: calls.append(k) or x)
    backend, layer, made = HopperExperts(), Layer(EXPERTS, HIDDEN, INTER), request_of(Contract())
    backend.prepare(layer.w13, layer.w2, made.w13_site, made.w2_site)
    w13, w2 = SiteStatistics(HIDDEN, ring_rows=8), SiteStatistics(INTER, EXPERTS)
    valid = torch.tensor([3], dtype=torch.int32)
    backend.forward(made)
    backend.forward(replace(made, w13_statistics=w13, w2_statistics=w2, valid=valid))
    assert calls[0]["statistics"] is None
    gathering = calls[1]["statistics"]
    assert (gathering.w13, gathering.w2, gathering.valid) == (w13, w2, valid)


def test_tokens_of_a_step_are_a_view_of_the_engines_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens without padding rows is read where vLLM writes it, so that graphs see each step's."""
    start = torch.tensor([0, 1, 2, 7], dtype=torch.int32)
    metadata: Any = {"a": SimpleNamespace(), "b": SimpleNamespace(query_start_loc=start)}
    monkeypatch.setattr(compat, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(compat, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    count = compat.token_count(torch.device("cpu"))
    assert count is not None
    start[3] = 9
    assert count.tolist() == [9]
    metadata = None
    assert compat.token_count(torch.device("cpu")) is None


@pytest.mark.parametrize(("mode", "expected"), [("NONE", False), ("FULL_AND_PIECEWISE", True), (None, False)])
def test_which_engines_capture(mode: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a GPU capture unless they are eager; on a CPU none does."""
    setting = None if mode is None else SimpleNamespace(name=mode)
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=setting))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compat, "is_cpu", lambda: False)
    assert compat.captures_graphs(vllm_config) == expected
    monkeypatch.setattr(compat, "is_cpu", lambda: True)
    assert not compat.captures_graphs(vllm_config)


def test_rolled_back_load_does_not_shorten_the_next() -> None:
    """Derived operands that graphs replay are rebuilt when *all* matrices are new: what arrived before a rollback does
    not count."""
    layer = nn.Module()
    matrices = [
        Matrix(name, 16, 32, (0, 16), (0, 32), "", (slice(16 * i, 16 * i + 16),), (i,)) for i, name in enumerate("ab")
    ]
    add_parameters(layer, "", (32,), 32, (2,), print)
    loader = PackedLoader(layer, [[m] for m in matrices], str)
    completed: list[int] = []
    loader.on_complete = lambda: completed.append(loader.version)
    first, second = (lambda m=m: loader.load(m, Role.WEIGHT, torch.ones(16, 32), layer.weight) for m in matrices)
    first()
    loader.forget_partial()
    second()
    assert not completed
    first()
    assert completed == [loader.version]
