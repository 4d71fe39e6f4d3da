# SPDX-License-Identifier: Apache-2.0
"""Weights that are copied without vLLM's loaders: only where the loaders were seen to copy them and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vllm_quads.plugin.direct import DirectCopies

Loader = Callable[[nn.Module, Tensor], object]


class Model(nn.Module):
    """Parameters, one in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)
        self.inner = nn.Module()
        self.inner.w = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)
        self.scalar = nn.Parameter(torch.zeros((), dtype=torch.bfloat16), requires_grad=False)
        self.derived = torch.zeros(())


class Loads:
    """`DirectCopies` in front of loaders; knows for which tensors these were asked."""

    def __init__(self, loaders: dict[str, Loader]) -> None:
        self.model = Model()
        self.direct = DirectCopies(self.model)
        self.loaders = loaders
        self.asked: list[str] = []

    @torch.no_grad()
    def __call__(self, tensors: dict[str, Tensor]) -> list[str]:
        left = self.direct.copy(list(tensors.items()))
        with self.direct.watching(left):
            for name, tensor in left:
                self.loaders[name](self.model, tensor)
        return [name for name, _ in left]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


COPIES: dict[str, tuple[Loader, tuple[int, ...], Callable[[Model], Tensor], Callable[[Tensor], Tensor]]] = {
    "whole": (lambda m, t: m.w.data.copy_(t), (6, 4), lambda m: m.w, lambda t: t),
    "rows of a fused parameter": (lambda m, t: m.w[2:5].copy_(t), (3, 4), lambda m: m.w[2:5], lambda t: t),
    "columns of a shard": (lambda m, t: m.w.copy_(t.narrow(1, 4, 4)), (6, 8), lambda m: m.w, lambda t: t[:, 4:]),
    "parts": (lambda m, t: [m.w[:3].copy_(t[3:]), m.w[3:].copy_(t[:3])], (6, 4), lambda m: m.w, lambda t: t.roll(3, 0)),
    "two parameters": (lambda m, t: [m.w.copy_(t), m.inner.w.copy_(t)], (6, 4), lambda m: m.inner.w, lambda t: t),
    "another view": (lambda m, t: m.w.view(-1).copy_(t.flatten()), (6, 4), lambda m: m.w, lambda t: t),
    "scalar": (lambda m, t: m.scalar.copy_(t.squeeze()), (1,), lambda m: m.scalar, lambda t: t[0]),
    "no padding": (lambda m, t: [m.w[:6].copy_(t), m.w[6:].fill_(0)], (6, 4), lambda m: m.w, lambda t: t),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_made_directly(name: str) -> None:
    """From the second time on the loader is not asked, and the parameter holds what the loader would have written; also
    where tensors are parts of one buffer."""
    loader, shape, target, wanted = COPIES[name]
    load = Loads({name: loader, "other": lambda m, t: None})
    for seed in range(3):
        both = random(2, *shape, seed=seed)
        assert load({"other": both[0], name: both[1]}) == (["other", name] if seed == 0 else ["other"])
        assert torch.equal(target(load.model), wanted(both[1]))


OTHERWISE: dict[str, Loader] = {
    "arithmetic": lambda m, t: m.w.copy_(t + 1),
    "arithmetic in place": lambda m, t: m.w.copy_(t).add_(1),
    "a look at the values": lambda m, t: m.w.copy_(t) if float(t.sum()) < 1e9 else None,
    "another dtype": lambda m, t: m.w.copy_(t.float()),
    "a transposed parameter": lambda m, t: m.w.view(4, 6).T.copy_(t),
    "something derived of it": lambda m, t: [m.w.copy_(t), m.derived.copy_(t.sum())],
    "something derived of the parameter": lambda m, t: [m.w.copy_(t), m.derived.copy_(m.w.sum())],
    "padding": lambda m, t: [m.w.copy_(t), m.w[5:].fill_(0)],
    "twice": lambda m, t: [m.w.copy_(t), m.w.copy_(t)],
    "nothing": lambda m, t: None,
    "another memory": lambda m, t: setattr(m.w, "data", t.clone()),
    "another parameter": lambda m, t: setattr(m, "w", nn.Parameter(t.clone(), requires_grad=False)),
    "a copy, and then another memory": lambda m, t: [m.w.copy_(t), setattr(m.w, "data", m.w.data.clone())],
    "no parameter": lambda m, t: m.derived.copy_(t[0, 0]),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_whatever_else_a_loader_does_stays_its_own(name: str) -> None:
    """A loader that does anything but copy is asked every time."""
    load, alone = Loads({name: OTHERWISE[name]}), Model()
    for seed in range(3):
        tensor = random(6, 4, seed=seed)
        assert load({name: tensor}) == [name]
        with torch.no_grad():
            OTHERWISE[name](alone, tensor)
        assert torch.equal(load.model.w, alone.w)
        assert torch.equal(load.model.derived, alone.derived)


def test_two_tensors_of_one_place() -> None:
    """Where tensors overwrite each other their order decides, which copies made together do not have; whether they came
    together or one by one when they were watched."""
    loader: Loader = lambda m, t: m.w[: t.shape[0]].copy_(t)  # noqa: E731
    for together in (True, False):
        load = Loads({"long": loader, "short": loader})
        if not together:
            assert load({"short": random(2, 4)}) == ["short"]
            assert load({"long": random(6, 4)}) == ["long"]
        for seed in range(3):
            assert load({"long": random(6, 4, seed=seed), "short": random(2, 4, seed=9)}) == ["long", "short"]
            assert torch.equal(load.model.w[:2], random(2, 4, seed=9))


def test_one_memory_under_two_names() -> None:
    """Tensors that have memory in common when they are watched, all of it or a part, teach nothing: each is watched
    when it comes by itself, and copied from then on. Where one is written over another is known nevertheless."""
    loaders: dict[str, Loader] = {
        "a": lambda m, t: m.w.copy_(t),
        "b": lambda m, t: m.inner.w.copy_(t),
        "part": lambda m, t: m.scalar.copy_(t[0]),
    }
    load, alone = Loads(loaders), Model()

    def check(tensors: dict[str, Tensor], asked: list[str]) -> None:
        assert load(tensors) == asked
        with torch.no_grad():
            for name, t in tensors.items():
                loaders[name](alone, t)
        for mine, theirs in zip(load.model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    one = random(6, 4)
    for _ in range(2):
        check({"a": one, "part": one.view(-1)[5:9], "b": one}, ["a", "part", "b"])
    first = {"a": random(6, 4, seed=1), "part": random(4, seed=2), "b": random(6, 4, seed=3)}
    check(first, list(first))
    check({"b": random(6, 4, seed=4), "part": random(4, seed=5), "a": random(6, 4, seed=6)}, [])
    check({"a": one, "part": one.view(-1)[5:9], "b": one}, [])

    loaders["part"] = lambda m, t: m.w[0].copy_(t)
    load, alone = Loads(loaders), Model()
    for seed in range(3):
        tensors = {"a": one, "b": one} if seed == 0 else {"a": random(6, 4, seed=seed), "b": random(6, 4, seed=9)}
        check(tensors | {"part": random(4, seed=7)}, ["a", "b", "part"] if seed < 2 else ["a", "part"])


def test_what_has_changed_is_watched_anew() -> None:
    """Another shape or stride of the tensor, another memory or parameter in the model: the loader decides, and the new
    copy is remembered. Another dtype, too, but then for good. A loader that fails teaches nothing."""
    load = Loads({"t": lambda m, t: m.w[: t.shape[0]].copy_(t)})
    forms = [random(6, 4), random(3, 4), random(4, 3).T, random(6, 4)]
    asked = [load({"t": t}) for t in (forms[0], *forms)]
    assert asked == [["t"], [], ["t"], ["t"], ["t"]]
    model = load.model
    model.w.data = model.w.data.clone()
    assert [load({"t": random(6, 4, seed=s)}) for s in (1, 2)] == [["t"], []]
    assert torch.equal(model.w, random(6, 4, seed=2))
    kept = model.w
    model.w = nn.Parameter(torch.zeros_like(kept), requires_grad=False)
    assert load({"t": random(6, 4, seed=3)}) == ["t"]
    assert torch.equal(model.w, random(6, 4, seed=3))
    assert torch.equal(kept, random(6, 4, seed=2))
    for tensor in (random(6, 4).float(), random(6, 4), random(6, 4)):
        load.direct = DirectCopies(model) if tensor.dtype == torch.float32 else load.direct
        assert load({"t": tensor}) == ["t"]
        assert torch.equal(model.w, random(6, 4))

    def failing(m: nn.Module, t: Tensor) -> None:
        m.w.copy_(t)
        raise OSError("broken")

    load = Loads({"t": failing})
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            load({"t": random(6, 4)})
