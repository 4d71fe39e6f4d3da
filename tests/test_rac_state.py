# SPDX-License-Identifier: Apache-2.0
"""The saved state of compensation: what it accepts, how it travels, and what a damaged file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rac_data import random_site
from safetensors.torch import load_file, save_file

from vllm_quads.compensation import STATE_FILE, CompensationState, SiteState
from vllm_quads.nvfp4 import CheckpointError, FormatError

W13, W2 = "model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2"


def state() -> CompensationState:
    sites = {W13: random_site(64, centered=True), W2: random_site(48, 4, seed=1)}
    return CompensationState(sites, {W13: 1e-7 / 3.0, W2: 2.5})


def assert_same(a: CompensationState, b: CompensationState) -> None:
    assert dict(a.sensitivities) == dict(b.sensitivities)
    assert set(a.sites) == set(b.sites)
    for name in a.sites:
        assert torch.equal(a.sites[name].center, b.sites[name].center)
        assert torch.equal(a.sites[name].blocks, b.sites[name].blocks)


def test_state_survives_a_file(tmp_path: Path) -> None:
    """Save and load give back every bit and the same fingerprint; nothing else is left behind."""
    saved = state()
    path = saved.save(tmp_path)
    loaded = CompensationState.load(tmp_path)
    assert loaded is not None
    assert_same(loaded, saved)
    assert loaded.fingerprint() == saved.fingerprint()
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [STATE_FILE]
    assert path == tmp_path / STATE_FILE
    CompensationState().save(tmp_path)  # overwrites
    again = CompensationState.load(tmp_path)
    assert again is not None
    assert not again.sites


def test_a_checkpoint_without_state_has_none(tmp_path: Path) -> None:
    """A directory without the file is not an error."""
    assert CompensationState.load(tmp_path) is None


def test_sites_may_share_a_buffer(tmp_path: Path) -> None:
    """Sites that are views of one buffer, or the same tensor, are written like any other."""
    center, blocks = torch.randn(64), torch.rand(2, 4) < 0.5
    sites = {"a": SiteState(center[:32], blocks[:, :2]), "b": SiteState(center[32:], blocks[:, 2:])}
    saved = CompensationState({**sites, "c": sites["a"]})
    saved.save(tmp_path)
    loaded = CompensationState.load(tmp_path)
    assert loaded is not None
    assert_same(loaded, saved)


def test_fingerprint_covers_every_value() -> None:
    """One block, one last bit of a centring value, or swapped sites give another fingerprint; order does not."""
    base = state()
    sites = dict(base.sites)
    blocks = sites[W2].blocks.clone()
    blocks[3, 2] = ~blocks[3, 2]
    center = sites[W13].center.clone()
    center[9] = torch.nextafter(center[9], torch.tensor(9.0))
    changed = [
        {**sites, W2: SiteState(sites[W2].center, blocks)},
        {**sites, W13: SiteState(center, sites[W13].blocks)},
        {W13: sites[W13]},
        {W2: sites[W13], W13: sites[W2]},
    ]
    prints = {CompensationState(s).fingerprint() for s in changed}
    assert len(prints) == 4
    assert base.fingerprint() not in prints
    assert CompensationState(dict(reversed(sites.items()))).fingerprint() == base.fingerprint()


def test_empty_site_does_nothing() -> None:
    """`SiteState.empty` has no centring and no block, with the shapes asked for."""
    site = SiteState.empty(48, 3)
    assert site.center.shape == (48,)
    assert site.blocks.shape == (3, 3)
    assert not site.center.any()
    assert not site.blocks.any()


@pytest.mark.parametrize(
    ("center", "blocks", "message"),
    [
        (torch.zeros(40), torch.zeros(1, 2) > 0, "K % 16"),
        (torch.zeros(32, dtype=torch.bfloat16), torch.zeros(1, 2) > 0, "expected float32"),
        (torch.zeros(1, 32), torch.zeros(1, 2) > 0, r"expected float32 \[K\]"),
        (torch.full((32,), torch.nan), torch.zeros(1, 2) > 0, "NaN or Inf"),
        (torch.full((32,), torch.inf), torch.zeros(1, 2) > 0, "NaN or Inf"),
        (torch.zeros(32), torch.zeros(1, 3) > 0, r"expected bool \[groups, 2\]"),
        (torch.zeros(32), torch.zeros(2) > 0, r"expected bool \[groups, 2\]"),
        (torch.zeros(32), torch.zeros(1, 2), "expected bool"),
    ],
)
def test_malformed_sites_are_refused(center: torch.Tensor, blocks: torch.Tensor, message: str) -> None:
    """A site's shapes, dtypes and values are checked when it is made."""
    with pytest.raises(FormatError, match=message):
        SiteState(center, blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{W2}.blocks": None}, W2),
        ({f"{W13}.center": None}, W13),
        ({f"{W13}.center": torch.full((64,), torch.nan)}, "NaN"),
        ({f"{W13}.center": torch.zeros(64, dtype=torch.float16)}, "float16"),
        ({f"{W2}.blocks": torch.zeros(4, 2, dtype=torch.uint8)}, "expected bool"),
        ({f"{W2}.codes": torch.zeros(4)}, "codes"),
        ({f"{W2}.sensitivity": torch.zeros(2)}, "calibrate"),
    ],
)
def test_a_damaged_file_is_named(change: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    """A missing, malformed or unknown tensor is one CheckpointError with file and way out, never a lost site."""
    path = state().save(tmp_path)
    tensors = {k: v for k, v in {**load_file(path), **change}.items() if v is not None}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message) as e:
        CompensationState.load(tmp_path)
    assert str(path) in str(e.value)
    assert "quads quantize --calibrate" in str(e.value)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_named(size: int, tmp_path: Path) -> None:
    """A file cut anywhere, in the header or in the data, is one CheckpointError."""
    path = state().save(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"compensation\.safetensors: cannot be read"):
        CompensationState.load(tmp_path)


def test_a_state_prints_as_one_line() -> None:
    """What is printed says how much is chosen, and holds no tensors."""
    site = SiteState(torch.tensor([0.0] * 16 + [1.0] * 16), torch.tensor([[True, False], [True, True]]))
    state = CompensationState({"a": site, "b": SiteState.empty(32)})
    assert repr(state) == "CompensationState(2 sites, 3 of 6 blocks, 1 centred)"
