# SPDX-License-Identifier: Apache-2.0
"""The seam between plugin and Hopper kernels, without a GPU: what the kernels are given, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rac_data import Layer
from torch import nn

pytest.importorskip("vllm")

from vllm_quads.compensation import SiteState
from vllm_quads.nvfp4 import Contract, ContractError, Scheme
from vllm_quads.plugin import compat, config, hopper
from vllm_quads.plugin.backends import BackendChoice, TorchExperts
from vllm_quads.plugin.hopper import HopperExperts
from vllm_quads.plugin.loading import Matrix, PackedLoader, Role, add_parameters

EXPERTS, HIDDEN, INTER, TOKENS = 2, 64, 48, 5
MAP = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)


def arguments(contract: Contract) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, 4, (TOKENS, 2), generator=generator, dtype=torch.int32)
    ids[0, 1] = -1
    sites = (
        SiteState(torch.linspace(-1, 1, HIDDEN), torch.tensor([[True, False, True, False]])),
        SiteState.empty(INTER, EXPERTS),
    )
    keywords: dict[str, Any] = dict.fromkeys(("g13", "g2", "decode", "w13_statistics", "w2_statistics"))
    keywords |= {"expert_map": MAP, "w13_site": sites[0], "w2_site": sites[1]}
    return [x, torch.rand(TOKENS, 2, generator=generator), ids, contract], keywords


def test_kernels_get_global_ids_and_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels map expert ids themselves (they plan from the number of all experts), and what a captured graph reads
    is written in place when weights change."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        hopper, "quads_moe", lambda x, moe, w, ids, **k: calls.append({"moe": moe, "ids": ids, **k}) or x
    )
    backend = HopperExperts()
    args, keywords = arguments(Contract())
    for seed in (0, 7):
        layer = Layer(EXPERTS, HIDDEN, INTER, seed)
        backend.prepare(layer.w13, layer.w2, keywords["w13_site"], keywords["w2_site"])
        backend.forward(*args, **keywords)
    first, second = calls
    assert first["expert_map"] is MAP
    assert torch.equal(first["ids"], args[2])
    compensation = second["compensation"]
    assert compensation.full_all
    assert compensation.center13.data_ptr() == keywords["w13_site"].center.data_ptr()
    assert compensation.bias13.data_ptr() == first["compensation"].bias13.data_ptr()
    assert first["moe"].w13.data_ptr() == second["moe"].w13.data_ptr()
    reference = TorchExperts()
    reference.prepare(layer.w13, layer.w2, keywords["w13_site"], keywords["w2_site"])
    assert reference._prepared is not None
    expected = torch.stack([m.bias for m in reference._prepared.w13])  # type: ignore[misc]
    torch.testing.assert_close(compensation.bias13, expected)


@pytest.mark.parametrize("scheme", [Scheme.W4A16, Scheme.W4A4])
def test_reference_of_what_the_kernels_do_not_compute(scheme: Scheme) -> None:
    """W4A16 and float32 activations take the reference, with every token's full residual as the kernels give it."""
    contract = Contract().merged({"scheme": scheme.value})
    args, keywords = arguments(contract)
    args[0] = args[0].to(torch.float32)
    layer, outputs = Layer(EXPERTS, HIDDEN, INTER), []
    for backend in (HopperExperts(), TorchExperts()):
        backend.prepare(layer.w13, layer.w2, keywords["w13_site"], keywords["w2_site"])
        outputs.append(backend.forward(*args, **keywords | {"decode": torch.ones(TOKENS, dtype=torch.bool)}))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("name", "options", "dtype", "experts", "why"),
    [
        ("torch", {}, torch.bfloat16, True, "no nvcc"),
        ("hopper", {"scheme": "w4a16"}, torch.bfloat16, True, "w4a16"),
        ("hopper", {}, torch.float32, True, "float32"),
        ("hopper", {}, torch.bfloat16, False, "dense linears"),
        ("hopper", {}, torch.bfloat16, True, None),
    ],
)
def test_reference_is_never_captured(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    experts: bool,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference counts tokens on the host and moves its operands at a refit, which no CUDA graph survives: the
    start says so and what to do."""
    monkeypatch.setattr(config, "choose_backend", lambda device: BackendChoice(name, "no nvcc"))
    quads = config.QuadsConfig()
    quads._contract, quads._act_dtype = Contract().merged(options), dtype
    quads._refuse_to_capture_reference("model.layer", experts=experts)  # an eager engine captures nothing
    quads._captures = True
    if why is None:
        quads._refuse_to_capture_reference("model.layer", experts=experts)
        return
    with pytest.raises(ContractError, match=rf"model.layer: .*{why}.*enforce_eager"):
        quads._refuse_to_capture_reference("model.layer", experts=experts)


def test_captured_options_cannot_change() -> None:
    """A captured graph would replay the old options, and gather no statistics: both are refused, not ignored."""
    quads = config.QuadsConfig()
    quads._contract, quads._captures = Contract(), True
    quads.replace_contract(Contract())
    quads.collect(False)
    with pytest.raises(ContractError, match="enforce_eager=True"):
        quads.replace_contract(Contract().merged({"compensation": {"form": "none"}}))
    with pytest.raises(ContractError, match="enforce_eager=True"):
        quads.collect(True)
    assert quads.contract == Contract()


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
