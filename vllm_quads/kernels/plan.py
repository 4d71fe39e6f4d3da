# SPDX-License-Identifier: Apache-2.0
"""Which GEMM kernel runs where: decided from shapes alone, without a look at the device's data.

Four kernels multiply packed weights with 16-bit tokens (see csrc/):

    decode    mma.sync, an expert's tokens stay in shared memory over the whole K: few tokens times K
    batch     wgmma, four warpgroups decode, tokens streamed along K: up to 64 tokens of an expert, any K
    wide      wgmma, three warpgroups decode: up to 96 tokens of an expert, any K
    prefill   wgmma, two warpgroups with large accumulators: up to 160 tokens of an expert, any K

Both GEMMs of a layer share one list of segments (an expert's tokens, cut into equal parts of at most `capacity`).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_quads.kernels.layout import padded_k, padded_rows
from vllm_quads.nvfp4.errors import FormatError


class Gemm(enum.Enum):
    """A GEMM kernel."""

    DECODE = "decode"
    BATCH = "batch"
    WIDE = "wide"
    PREFILL = "prefill"


@dataclass(frozen=True)
class GemmChoice:
    """A kernel and how many of its consumers share rows and split K (1, 2 or 4; 1 for `WIDE` and `PREFILL`)."""

    gemm: Gemm
    k_groups: int = 1


@dataclass(frozen=True)
class LayerPlan:
    """What runs a layer."""

    first: GemmChoice
    second: GemmChoice
    capacity: int
    """Most tokens of a segment, a multiple of 8."""
    splits: int = 1
    """Parts of the second GEMM's K, summed together with the top-k."""


@dataclass(frozen=True)
class LayerShape:
    """What a plan depends on."""

    tokens: int
    top_k: int
    local_experts: int
    global_experts: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class DeviceLimits:
    """What the kernels and the GPU allow."""

    multiprocessors: int
    decode_capacity: Callable[[int, int], int]
    """(padded K, K groups) -> most tokens of a segment of the decode kernel, 0 if none fit."""
    batch_capacity: Callable[[int], int]
    """K groups -> most tokens of a segment of the batch kernel."""


FIXED_CAPACITY = {Gemm.WIDE: 96, Gemm.PREFILL: 160}
"""Most tokens of a segment of the kernels that do not split K."""
BATCH_MEAN = 48.0
"""Mean tokens per expert up to which the batch kernel runs; beyond, wide or prefill."""
DECODE_MEAN = 10.0
"""Mean tokens per expert up to which the decode kernel runs where an expert's tokens fit."""
FEW_EXPERTS = 16
"""Experts so few that one of them is a large part of a layer."""
MIN_SPLIT_K = 1024
"""Shortest K that a split of the second GEMM is worth."""
DECODE_SPLIT_COST = {1: 0.0, 2: 0.12, 4: 0.36}
"""Relative cost of splitting K among the consumers of the decode kernel."""
BATCH_SPLIT_COST = 330.0
"""Relative cost of splitting K in two among those of the batch kernel, times K: its sum takes as long for a short K."""
SPLIT_COST = 0.06
"""Relative cost of splitting K in two between thread blocks."""
UNIT_TOKENS = 50.0
"""Tokens whose multiplication takes as long as decoding a unit of the wide or prefill kernel."""
PREFILL_COST, PREFILL_DEPTH = 1.06, 108.0
"""Time of the prefill kernel for a weight row relative to the wide one, for large K; what a short one adds, times K."""


def plan_layer(
    shape: LayerShape,
    limits: DeviceLimits,
    *,
    gemms: tuple[Gemm | None, Gemm | None] = (None, None),
    k_groups: tuple[int | None, int | None] = (None, None),
    capacity: int | None = None,
    splits: int | None = None,
) -> LayerPlan:
    """Kernels and segment capacity of one layer; the other arguments override the built-in choice.

    Raises FormatError if what is asked for does not fit into shared memory, or no kernel has it.
    """
    if not {*k_groups} <= {None, 1, 2, 4}:
        raise FormatError(f"k_groups {k_groups}: expected 1, 2 or 4 each, or None")
    if capacity is not None and (capacity < 8 or capacity % 8):
        raise FormatError(f"capacity {capacity}: expected a multiple of 8 tokens")
    pairs = shape.tokens * shape.top_k
    mean = pairs / shape.global_experts
    # Room for all but a few percent of the experts under uniform routing (the others are computed in two parts), and
    # for all where an expert is a large part of the layer or room costs little, as in the batch kernel.
    needed = capacity or _room(shape, mean, 2.0)
    wanted = capacity or _room(shape, mean, 2.0 if mean <= DECODE_MEAN and shape.global_experts > FEW_EXPERTS else 4.0)
    depths = (padded_k(shape.hidden), padded_k(shape.intermediate))
    rows = (padded_rows(2 * shape.intermediate), padded_rows(shape.hidden))
    if mean > BATCH_MEAN:
        gemms = _wide_or_prefill(shape, limits, rows, depths, gemms)
    choices, room = [], FIXED_CAPACITY[Gemm.PREFILL]
    for gemm, groups, k, n in zip(gemms, k_groups, depths, rows, strict=True):
        small = groups or _k_groups(shape, limits, n, DECODE_SPLIT_COST.__getitem__)
        fits = limits.decode_capacity(k, small)
        if gemm is None:
            gemm = Gemm.DECODE if mean <= DECODE_MEAN and fits >= min(needed, 32) else Gemm.BATCH
        if gemm is Gemm.DECODE:
            choice, most = GemmChoice(gemm, small), fits
        elif gemm is Gemm.BATCH:
            choice = GemmChoice(gemm, groups or _k_groups(shape, limits, n, _batch_split_cost(k)))
            most = limits.batch_capacity(choice.k_groups)
        else:
            choice, most = GemmChoice(gemm), FIXED_CAPACITY[gemm]
        if most < 8:
            raise FormatError(f"{choice.gemm.value} GEMM: not even 8 tokens with K = {k} fit into shared memory")
        choices.append(choice)
        room = min(room, most)
    if capacity is not None and capacity > room:
        raise FormatError(f"capacity {capacity}: the chosen kernels have room for {room} tokens")
    if all(c.gemm in FIXED_CAPACITY for c in choices) and capacity is None:
        wanted = FIXED_CAPACITY[Gemm.PREFILL]  # all the room there is: fewer parts
    if splits is None:
        splits = _splits(shape, limits, choices[1], depths[1], rows[1])
    elif splits != 1:
        parts = choices[1].k_groups * splits * (2 if choices[1].gemm is Gemm.PREFILL else 1)
        if choices[1].gemm is Gemm.DECODE or splits not in (2, 4, 8) or depths[1] // 64 % parts:
            raise FormatError(
                f"splits {splits}: {choices[1].gemm.value} GEMM with {choices[1].k_groups} K groups cannot cut K = "
                f"{depths[1]} into as many parts of 64"
            )
    return LayerPlan(choices[0], choices[1], min(wanted, room), splits)


def _batch_split_cost(k: int) -> Callable[[int], float]:
    return lambda groups: BATCH_SPLIT_COST / k * math.log2(groups)


def _splits(shape: LayerShape, limits: DeviceLimits, choice: GemmChoice, k: int, rows: int) -> int:
    """Parts of the second GEMM's K: those that fill the multiprocessors best, if each keeps a long enough K and the
    partial sums are few."""
    if choice.gemm is not Gemm.BATCH or shape.tokens * shape.top_k / shape.global_experts > DECODE_MEAN:
        return 1
    units = _experts_hit(shape) * -(-rows * choice.k_groups // 512)
    possible = [s for s in (1, 2, 4, 8) if s == 1 or (k // s >= MIN_SPLIT_K and k // 64 % (choice.k_groups * s) == 0)]
    return min(
        possible, key=lambda s: math.ceil(units * s / limits.multiprocessors) / s * (1.0 + SPLIT_COST * math.log2(s))
    )


def _experts_hit(shape: LayerShape) -> float:
    """Local experts that get a token, under uniform routing."""
    return shape.local_experts * (1.0 - max(0.0, 1.0 - shape.top_k / shape.global_experts) ** shape.tokens)


def _k_groups(shape: LayerShape, limits: DeviceLimits, rows: int, split_cost: Callable[[int], float]) -> int:
    """K groups: smaller units where they fill the multiprocessors better. split_cost: relative cost of so many."""
    best, cheapest = 1, math.inf
    for groups in (1, 2, 4):
        units = _experts_hit(shape) * -(-rows * groups // 512)
        cost = math.ceil(units / limits.multiprocessors) / groups * (1.0 + split_cost(groups))
        if cost < cheapest:
            best, cheapest = groups, cost
    return best


def _wide_or_prefill(
    shape: LayerShape,
    limits: DeviceLimits,
    rows: tuple[int, int],
    depths: tuple[int, int],
    given: tuple[Gemm | None, Gemm | None],
) -> tuple[Gemm, Gemm]:
    """Kernels of both GEMMs, where not given: those whose units fill the multiprocessors best, with few parts of an
    expert's tokens, which are the same in both."""
    mean = shape.tokens * shape.top_k / shape.global_experts

    def cost(gemm: Gemm, n: int, k: int, capacity: int) -> float:
        unit_rows, factor = (256, PREFILL_COST + PREFILL_DEPTH / k) if gemm is Gemm.PREFILL else (384, 1.0)
        parts = _parts(mean, capacity)
        rounds = _experts_hit(shape) * parts * -(-n // unit_rows) / limits.multiprocessors
        rounds = math.ceil(rounds) if rounds < 6.0 else rounds + 0.5
        return rounds * unit_rows * (mean / parts + UNIT_TOKENS) * k * factor

    def total(gemms: tuple[Gemm, Gemm]) -> float:
        capacity = min(FIXED_CAPACITY.get(g, FIXED_CAPACITY[Gemm.WIDE]) for g in gemms)
        return sum(cost(g, n, k, capacity) for g, n, k in zip(gemms, rows, depths, strict=True))

    large = (Gemm.WIDE, Gemm.PREFILL)
    first, second = ([g] if g is not None else large for g in given)
    return min(itertools.product(first, second), key=total)


def _parts(mean: float, capacity: int) -> float:
    """Parts in which an expert's tokens are computed, on average, under uniform routing."""
    deviation = math.sqrt(2.0 * mean)
    most = math.ceil(mean / capacity) + 2
    return 1.0 + sum(0.5 * math.erfc((i * capacity + 0.5 - mean) / deviation) for i in range(1, most))


def _room(shape: LayerShape, mean: float, deviations: float) -> int:
    return _multiple_of_8(min(float(shape.tokens), mean + deviations * math.sqrt(mean)))


def _multiple_of_8(tokens: float) -> int:
    return max(8, -(-math.ceil(tokens) // 8) * 8)


@dataclass(frozen=True)
class LinearShape:
    """What the plan of a dense linear depends on."""

    tokens: int
    rows: int
    k: int


@dataclass(frozen=True)
class LinearPlan:
    """What runs a dense linear."""

    kernel: GemmChoice
    capacity: int
    """Tokens that are multiplied at a time, a multiple of 8."""
    splits: int = 1
    """Parts of K, summed afterwards: 1, 2, 4 or 8."""


def plan_linear(shape: LinearShape, limits: DeviceLimits) -> LinearPlan:
    """The cheapest way by a rough count of the clocks of the multiprocessor that has most to do.

    Raises FormatError if nothing fits, which no supported K does.
    """
    k, rows = padded_k(shape.k), padded_rows(shape.rows)
    wanted = _multiple_of_8(shape.tokens)
    best: tuple[float, LinearPlan] | None = None
    for gemm, groups, splits in itertools.product(Gemm, (1, 2, 4), (1, 2, 4, 8)):
        most = {
            Gemm.DECODE: limits.decode_capacity(k, groups),
            Gemm.BATCH: limits.batch_capacity(groups),
            **(FIXED_CAPACITY if groups == 1 else dict.fromkeys(FIXED_CAPACITY, 0)),
        }[gemm]
        if most < 8 or (splits > 1 and (gemm is Gemm.DECODE or k % (MIN_SPLIT_K // 2 * splits))):
            continue
        capacity = min(wanted, most)
        unit_rows = {Gemm.WIDE: 384, Gemm.PREFILL: 256}.get(gemm, 512 // groups)
        units = -(-rows // unit_rows) * -(-shape.tokens // capacity) * splits
        # decoding bounds few tokens, the tensor cores many
        rate = min(WEIGHTS_A_CLOCK[gemm], MULTIPLICATIONS_A_CLOCK[gemm] / capacity)
        waves = -(-units // limits.multiprocessors)
        cost = waves * (unit_rows * k / splits / rate + UNIT_CLOCKS * (1.0 + LINEAR_SPLIT_COST * groups))
        if splits > 1:
            cost += SUM_CLOCKS + shape.tokens * rows * splits * 8 / BYTES_A_CLOCK
        if best is None or cost < best[0]:
            best = (cost, LinearPlan(GemmChoice(gemm, groups), capacity, splits))
    if best is None:
        raise FormatError(f"linear: not even 8 tokens with K = {shape.k} fit into shared memory")
    return best[1]


WEIGHTS_A_CLOCK = {Gemm.DECODE: 33.0, Gemm.BATCH: 30.0, Gemm.WIDE: 25.0, Gemm.PREFILL: 20.0}
"""Weights that one multiprocessor decodes a clock."""
MULTIPLICATIONS_A_CLOCK = {Gemm.DECODE: 1000.0, Gemm.BATCH: 2000.0, Gemm.WIDE: 2200.0, Gemm.PREFILL: 2400.0}
"""Weights times tokens that one multiprocessor multiplies a clock."""
UNIT_CLOCKS = 2000.0
"""Start and epilogue of a unit."""
LINEAR_SPLIT_COST = 0.07
"""Part of UNIT_CLOCKS by which each K group of a unit adds to them."""
SUM_CLOCKS = 4000.0
"""The launch that sums the parts of K."""
BYTES_A_CLOCK = 2000.0
"""Bytes of partial sums that all multiprocessors write or read a clock."""
