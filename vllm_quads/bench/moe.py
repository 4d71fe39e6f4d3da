# SPDX-License-Identifier: Apache-2.0
"""`quads bench moe`: one MoE layer, QUADS against vLLM's own kernels in the same process.

Everything a layer does between the router and the residual stream is timed: grouping, activation quantization (with
residual compensation), both GEMMs, SiLU·mul, the top-k sum. CUDA graphs, four layers in rotation (so that no weight is
found in the L2 cache), uniform routing without replacement, the same inputs for everybody; all kernels replay in turn,
and each one's median counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from vllm_quads.bench import environment, floors
from vllm_quads.bench.layers import DEFAULT, PLAIN, QUARTER, VARIANTS, RandomLayer, relative_error, uniform_inputs
from vllm_quads.bench.result import Result, Series
from vllm_quads.bench.shapes import MoEShape
from vllm_quads.bench.timing import copy_bandwidth, interleaved_us, matmul_flops

TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
LAYERS = 4
CHECKED_TOKENS = 1024
"""Outputs are compared with FP64 up to this many tokens: beyond, the reference takes longer than the benchmark."""
Progress = Callable[[int, int, str], None]
_COPY, _MATMUL = "copy bandwidth, bytes/s", "BF16 matmul, FLOP/s"


def run_moe(
    shape: MoEShape,
    tokens: Sequence[int] = TOKENS,
    *,
    peers: bool = True,
    check: bool = True,
    repeats: int = 15,
    progress: Progress = lambda *_: None,
) -> Result:
    """Measure one shape. Raises MissingEnvironment where there is no Hopper GPU, or no vLLM for the peers."""
    environment.require(vllm=peers)
    steps, done = len(tokens) + 2, 0

    def step(what: str) -> None:
        nonlocal done
        progress(done, steps, what)
        done += 1

    step("copy bandwidth")
    facts = {_COPY: copy_bandwidth(), _MATMUL: matmul_flops()}
    step("building layers")
    times: dict[str, dict[int, float]] = {v.name: {} for v in VARIANTS}
    errors: dict[str, dict[int, float]] = {}
    hit: dict[int, float] = {}
    missing: dict[str, str] = {}
    notes: dict[str, str] = {}
    with _vllm_config() if peers else contextlib.nullcontext():
        layers = [RandomLayer(shape, seed) for seed in range(LAYERS)]
        compensations = {v.name: [layer.compensation(v) for layer in layers] for v in VARIANTS}
        others = _build_peers(shape, notes, missing) if peers else {}
        times |= {name: {} for name in others}
        for m in tokens:
            step(f"{m} tokens")
            inputs = [uniform_inputs(shape, m, seed=1000 * m + i) for i in range(LAYERS)]
            hit[m] = sum(int(i[2].unique().numel()) for i in inputs) / LAYERS
            if check and m <= CHECKED_TOKENS:
                for v in (PLAIN, QUARTER, DEFAULT):
                    _check(layers[0], v, inputs[0], errors, m)
            kernels: dict[str, list[Callable[[], object]]] = {
                v.name: [
                    partial(layer.forward, i, v, c)
                    for layer, i, c in zip(layers, inputs, compensations[v.name], strict=True)
                ]
                for v in VARIANTS
            }
            for name, built in others.items():
                kernels[name] = [partial(f, *i) for f, i in zip(built, inputs, strict=True)]
            measured, failed = interleaved_us(kernels, repeats=repeats)
            for name, us in measured.items():
                times[name][m] = us
            missing |= {f"{name} at {m} tokens": why for name, why in failed.items()}
    progress(steps, steps, "")
    own = {v.name for v in VARIANTS}
    series = [
        Series(name, "quads" if name in own else "peer", "us", values, notes.get(name, ""))
        for name, values in times.items()
        if values
    ]
    series += floor_series(shape, hit, facts)
    series += [Series(name, "check", "relative error", values) for name, values in errors.items()]
    settings: dict[str, Any] = {
        "name": shape.name,
        "shape": shape.to_dict(),
        "routing": "uniform without replacement",
        "layers_rotated": LAYERS,
        "repeats": repeats,
        "experts_hit": {str(m): n for m, n in hit.items()},
    }
    return Result(
        "moe",
        f"One MoE layer, {shape.name}",
        "tokens",
        tuple(series),
        environment.describe(),
        settings,
        facts,
        missing=missing,
    )


def floor_series(shape: MoEShape, hit: dict[int, float], facts: dict[str, float]) -> list[Series]:
    """Byte floors at the measured copy bandwidth, and the FLOP floor at the measured speed of cuBLAS."""
    result = [
        Series(
            f"floor: {name} bytes",
            "floor",
            "us",
            {m: floors.weight_bytes_us(shape, n, bits, facts[_COPY]) for m, n in hit.items()},
            f"{bits:g} bits per weight of the experts hit",
        )
        for name, bits in floors.BITS.items()
    ]
    flops = {m: floors.flops_us(shape, m, facts[_MATMUL]) for m in hit}
    return [*result, Series("floor: BF16 FLOPs", "floor", "us", flops)]


def _check(layer: RandomLayer, variant: Any, inputs: Any, errors: dict[str, dict[int, float]], tokens: int) -> None:
    c = layer.compensation(variant)
    want = layer.reference(inputs, variant, c)
    got = layer.forward(inputs, variant, c)
    errors.setdefault(f"error against FP64: {variant.name}", {})[tokens] = relative_error(got, want)
    rounded = relative_error(want.to(torch.bfloat16), want)
    errors.setdefault("error of rounding the FP64 output to BF16", {})[tokens] = rounded


def _build_peers(shape: MoEShape, notes: dict[str, str], missing: dict[str, str]) -> dict[str, list[Any]]:
    from vllm_quads.bench.peers import PEERS

    built: dict[str, list[Any]] = {}
    for peer in PEERS:
        try:
            built[peer.name] = [peer.build(shape.experts, shape.hidden, shape.intermediate) for _ in range(LAYERS)]
            notes[peer.name] = peer.note(shape.experts, shape.intermediate)
        except Exception as e:  # internals of vLLM: whatever they raise must not cost the others their numbers
            missing[peer.name] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    return built


@contextlib.contextmanager
def _vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield
