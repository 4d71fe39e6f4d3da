# SPDX-License-Identifier: Apache-2.0
"""Tensor and expert parallelism: ranks load shards of one and the same quantized weight."""

from __future__ import annotations

import contextlib
from typing import Any

import layer_helpers
import pytest
import torch
from layer_helpers import PREFIX, SHARDS, Config, load_expert
from torch import nn

pytest.importorskip("vllm")

from vllm_quads.nvfp4 import (
    BLOCK_SIZE,
    CheckpointError,
    ContractError,
    PackedTensor,
    fingerprint_of,
    unit_fingerprint,
)
from vllm_quads.plugin.digests import DigestTable, added
from vllm_quads.plugin.linear import QuadsLinearMethod
from vllm_quads.plugin.moe import QuadsMoEMethod
from vllm_quads.plugin.units import units_of

EXPERTS, HIDDEN, INTER = 4, 64, 96


def moe_layer(tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)) -> tuple[Any, QuadsMoEMethod]:
    """A MoE layer of one rank: (rank, size) of tensor and of expert parallelism."""
    return layer_helpers.moe_layer(EXPERTS, HIDDEN, INTER, tp, ep)


def weights() -> dict[tuple[int, str], torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
    out = {
        (e, s): torch.randn(*shape, generator=g).to(torch.bfloat16)
        for e in range(EXPERTS)
        for s, shape in shapes.items()
    }
    out[1, "w1"][-1, -1] = 40.0  # the amax of expert 1 lies in the last shard of both dimensions
    out[1, "w2"][-1, -1] = 40.0
    return out


def load(layer: Any, method: QuadsMoEMethod) -> None:
    for (expert, shard), weight in weights().items():
        load_expert(layer, method, expert, shard, weight)
    method._loader.finish()


def test_tensor_parallel_shards_join_to_the_whole() -> None:
    """Gate and up are cut along N, down along K; codes, block scales and global scales of the shards are those of the
    whole weight, although the amax of a weight lies in one shard only."""
    whole, method = moe_layer()
    load(whole, method)
    shards = [moe_layer(tp=(rank, 2)) for rank in range(2)]
    for layer, shard_method in shards:
        load(layer, shard_method)
    for suffix in ("weight", "weight_scale"):
        parts = [getattr(layer, f"w13_{suffix}").view(torch.uint8).chunk(2, dim=1) for layer, _ in shards]
        joined = torch.cat([part[half] for half in (0, 1) for part in parts], dim=1)
        assert torch.equal(joined, getattr(whole, f"w13_{suffix}").view(torch.uint8))
        joined = torch.cat([getattr(layer, f"w2_{suffix}").view(torch.uint8) for layer, _ in shards], dim=2)
        assert torch.equal(joined, getattr(whole, f"w2_{suffix}").view(torch.uint8))
    for layer, _ in shards:
        assert torch.equal(layer.w13_weight_scale_2, whole.w13_weight_scale_2)
        assert torch.equal(layer.w2_weight_scale_2, whole.w2_weight_scale_2)


def test_expert_parallel_ranks_hold_their_experts() -> None:
    """Each rank keeps the experts of its expert map and ignores the others without an error."""
    whole, method = moe_layer()
    load(whole, method)
    for rank in range(2):
        layer, rank_method = moe_layer(ep=(rank, 2))
        load(layer, rank_method)
        mine = slice(rank * 2, rank * 2 + 2)
        assert torch.equal(layer.w13_weight, whole.w13_weight[mine])
        assert torch.equal(layer.w2_weight_scale.view(torch.uint8), whole.w2_weight_scale[mine].view(torch.uint8))
        assert layer.quads.w2.group_index == ((0, 1), (2, 3))[rank]
        assert rank_method._load(layer.w13_weight, torch.zeros(1), "", "w1", (3, 0)[rank], True) is False


def digests(*layers: Any) -> dict[str, int]:
    """Digests of the units of some ranks' layers, added up as a refit does."""
    ranks = []
    for layer in layers:
        units = units_of("x", layer.quads)
        ranks.append(DigestTable(units, torch.device("cpu")).of_what_serves(units))
    return added(ranks)


def test_digests_of_ranks_add_up_to_those_of_one() -> None:
    """The fingerprint is the same for one rank, for tensor parallelism (rows of w13, channels of w2; 48 channels do not
    fill a word of block scales), for expert parallelism, and for the checkpoint."""
    whole, method = moe_layer()
    load(whole, method)
    packed = {}
    for e in range(EXPERTS):
        parts = {s: weights()[e, s] for s in SHARDS}
        shared = torch.maximum(parts["w1"].abs().amax(), parts["w3"].abs().amax()).float()
        for s, w in parts.items():
            amax = w.abs().amax().float() if s == "w2" else shared
            packed[f"{PREFIX}.{e}.{SHARDS[s]}"] = PackedTensor.quantize(w, amax=amax)
    expected = digests(whole)
    assert unit_fingerprint(expected) == fingerprint_of(packed)
    for kind in ("tp", "ep"):
        ranks = []
        for rank in range(2):
            layer, rank_method = moe_layer(**{kind: (rank, 2)})
            load(layer, rank_method)
            ranks.append(layer)
        assert digests(*ranks) == expected
        assert digests(ranks[0], ranks[0]) != expected


def test_split_that_cuts_a_block_is_refused() -> None:
    """A shard of 24 channels would split a 16-channel block; the error says what to use instead."""
    with pytest.raises(ContractError, match=r"into 24 channels a rank.*enable_expert_parallel"):
        moe_layer(tp=(0, 4))


HEAD = "model.layers.0.self_attn"


def qkv() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, HIDDEN, generator=g).to(torch.bfloat16) for n in (128, 32, 32)]


def qkv_packed() -> dict[str, PackedTensor]:
    """The whole matrices, quantized with their shared scale."""
    amax = torch.cat(qkv()).abs().amax().float()
    return {f"{HEAD}.{p}_proj": PackedTensor.quantize(w, amax=amax) for p, w in zip("qkv", qkv(), strict=True)}


def qkv_layer(rank: int) -> tuple[Any, QuadsLinearMethod]:
    """q, k, v of one of four ranks that share two key/value heads, loaded."""
    layer: Any = nn.Module()
    layer.tp_rank, layer.total_num_heads, layer.total_num_kv_heads, layer.head_size = rank, 8, 2, 16
    layer.num_kv_head_replicas = 2
    method = QuadsLinearMethod.__new__(QuadsLinearMethod)
    method.config, method.key, method.parts = Config(), "k", [f"{HEAD}.{p}_proj" for p in "qkv"]
    method.create_weights(layer, HIDDEN, [32, 16, 16], HIDDEN, 256, torch.bfloat16)
    for shard, weight in zip("qkv", qkv(), strict=True):
        method._load(layer.weight, weight, shard)
    method._loader.finish()
    return layer, method


def test_digests_of_replicated_heads_count_once() -> None:
    """k and v that two ranks hold alike enter the sum over ranks once."""
    layers = [qkv_layer(rank)[0] for rank in range(4)]
    expected = fingerprint_of(qkv_packed())
    assert unit_fingerprint(digests(*layers)) == expected


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_replicated_key_and_value_heads(rank: int) -> None:
    """With more ranks than key/value heads, q is cut and k, v are replicated, from one global scale for all."""
    layer, _ = qkv_layer(rank)
    q, k, v = (qkv_packed()[f"{HEAD}.{p}_proj"].codes for p in "qkv")
    expected = [w.chunk(parts)[index] for w, parts, index in ((q, 4, rank), (k, 2, rank // 2), (v, 2, rank // 2))]
    assert torch.equal(layer.weight, torch.cat(expected))


def test_row_parallel_shard_and_fused_qkv_on_disk() -> None:
    """o_proj is cut along K; a checkpoint that stores q, k, v as one tensor is split into its parts."""
    g = torch.Generator().manual_seed(2)
    layer: Any = nn.Module()
    layer.tp_rank, layer.output_size = 1, 32
    method = QuadsLinearMethod.__new__(QuadsLinearMethod)
    method.config, method.key, method.parts = Config(), "k", ["model.layers.0.self_attn.o_proj"]
    method.create_weights(layer, 32, [32], 64, 32, torch.bfloat16)
    weight = torch.randn(32, 64, generator=g).to(torch.bfloat16)
    method._load(layer.weight, weight)
    packed = PackedTensor.quantize(weight)
    assert torch.equal(layer.weight, packed.codes[:, 16:])
    assert torch.equal(
        layer.weight_scale.view(torch.uint8), packed.block_scales.view(torch.uint8)[:, 32 // BLOCK_SIZE :]
    )

    layer = nn.Module()
    layer.output_sizes = [64, 32, 32]
    method = QuadsLinearMethod.__new__(QuadsLinearMethod)
    method.config, method.key, method.parts = Config(), "k", [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    method.create_weights(layer, 64, [64, 32, 32], 64, 128, torch.bfloat16)
    fused = torch.randn(128, 64, generator=g).to(torch.bfloat16)
    method._load(layer.weight, fused)
    assert torch.equal(layer.weight, PackedTensor.quantize(fused).codes)
    with pytest.raises(CheckpointError, match="expected 128 rows"):
        method._load(layer.weight, fused[:100])


def test_a_fusion_that_the_trainer_does_not_know_is_refused() -> None:
    """One matrix in vLLM has one global scale if the engine quantizes it: parts that a trainer quantizes apart would
    get other bytes. The latent attention's down-projections share theirs on both sides."""
    for parts, known in (
        (["m.layers.0.linear_attn.in_proj_qkv", "m.layers.0.linear_attn.in_proj_z"], False),
        ([f"{HEAD}.q_a_proj", f"{HEAD}.kv_a_proj_with_mqa"], True),
    ):
        layer: Any = nn.Module()
        layer.output_sizes = [32, 32]
        method = QuadsLinearMethod.__new__(QuadsLinearMethod)
        method.config, method.key, method.parts = Config(), "k", parts
        with contextlib.nullcontext() if known else pytest.raises(ContractError, match="a trainer gives separate"):
            method.create_weights(layer, 64, [32, 32], 64, 64, torch.bfloat16)
