# SPDX-License-Identifier: Apache-2.0
"""The weight kernels against the copy bandwidth of the card: what a trainer's step and a refit pay for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_quads.bench import environment
from vllm_quads.bench.result import Result, Series
from vllm_quads.bench.timing import copy_bandwidth, interleaved_us
from vllm_quads.kernels import weights as kernels
from vllm_quads.kernels.install import install_packed, install_quantized, stack_amax
from vllm_quads.kernels.layout import arranged_shape, unarrange
from vllm_quads.nvfp4.formats import BLOCK_SIZE

STACKS: dict[str, tuple[int, int, int]] = {"w13": (128, 1536, 2048), "w2": (128, 2048, 768)}
"""Expert stacks [E, N, K] of one layer of Qwen3-30B-A3B."""
PACKED_BYTES = 0.5 + 1 / BLOCK_SIZE
"""Of one weight: half a byte of code, a sixteenth of a block scale."""
Calls = dict[str, tuple[list[Callable[[], object]], float]]


def calls(stacks: Sequence[Tensor]) -> Calls:
    """Name -> (one call per stack, bytes that it has to move per weight)."""
    size = stacks[0].element_size()
    amaxes = [kernels.weight_amax(w) for w in stacks]
    packed = [kernels.quantize_stack(w, a) for w, a in zip(stacks, amaxes, strict=True)]
    values = [torch.empty_like(w) for w in stacks]
    digests = [kernels.digest_stack(p) for p in packed]

    def fake(w: Tensor, a: Tensor, v: Tensor) -> None:
        kernels.fake_quantize_stack(w, kernels.weight_amax(w, out=a), out=v)

    def payload(w: Tensor, a: Tensor, p: kernels.QuantizedStack) -> None:
        kernels.quantize_stack(w, kernels.weight_amax(w, out=a), out=p)

    sets = list(zip(stacks, amaxes, packed, values, digests, strict=True))
    return _installing(stacks, packed) | {
        "copy": ([partial(v.copy_, w) for w, _, _, v, _ in sets], 2.0 * size),
        "amax": ([partial(kernels.weight_amax, w, out=a) for w, a, *_ in sets], float(size)),
        "amax + fake quantization": ([partial(fake, w, a, v) for w, a, _, v, _ in sets], 3.0 * size),
        "fake quantization": (
            [partial(kernels.fake_quantize_stack, w, a, out=v) for w, a, _, v, _ in sets],
            2.0 * size,
        ),
        "amax + packing": ([partial(payload, w, a, p) for w, a, p, *_ in sets], 2 * size + PACKED_BYTES),
        "packing": ([partial(kernels.quantize_stack, w, a, out=p) for w, a, p, *_ in sets], size + PACKED_BYTES),
        "dequantization": (
            [partial(kernels.dequantize_stack, p, dtype=v.dtype, out=v) for _, _, p, v, _ in sets],
            size + PACKED_BYTES,
        ),
        "digest": ([partial(kernels.digest_stack, p, out=d) for _, _, p, _, d in sets], PACKED_BYTES),
        "clamped gradient": ([partial(kernels.clamp_gradient, v, w, a) for w, a, _, v, _ in sets], 3.0 * size),
    }


def _installing(stacks: Sequence[Tensor], packed: Sequence[kernels.QuantizedStack]) -> Calls:
    """What a refit does with the experts of a layer, where the Hopper kernels run: w13, then w2."""
    if torch.cuda.get_device_capability() != (9, 0) or stacks[0].dtype != torch.bfloat16:
        return {}
    floats: list[Callable[[], object]] = []
    ready: list[Callable[[], object]] = []
    back: list[Callable[[], object]] = []
    for weight, p, gate_up in zip(stacks, packed, (True, False), strict=True):
        experts, rows, k = weight.shape
        lead = (experts, 2 if gate_up else 1)
        out = torch.empty(experts, *arranged_shape(rows, k), dtype=torch.uint8, device="cuda")
        decode = torch.empty(lead, device="cuda")
        digests = torch.zeros(experts * lead[1], dtype=torch.int64, device="cuda")
        status = torch.zeros(1, dtype=torch.int32, device="cuda")
        packing = partial(install_packed, gate_up=gate_up, decode=decode, digests=digests, status=status)
        quantizing = partial(install_quantized, gate_up=gate_up, decode=decode, digests=digests, status=status)
        whole, amax = weight.view(*lead, -1, k), torch.zeros(experts, device="cuda")
        scales = p.block_scales.view(torch.uint8).view(*lead, -1, k // BLOCK_SIZE).view(torch.float8_e4m3fn)
        stack = kernels.QuantizedStack(p.codes.view(*lead, -1, k // 2), scales, p.decode_scale[:, None].expand(lead))
        floats += [partial(stack_amax, whole, amax), partial(quantizing, whole, amax, out)]
        ready.append(partial(packing, stack, out))
        back.append(partial(unarrange, out, rows, k, gate_up=gate_up, codes=p.codes, scales=p.block_scales))
    return {
        "amax + installing BF16": (floats, 4.0 + PACKED_BYTES),
        "installing packed": (ready, 2 * PACKED_BYTES),
        "back from the kernels' layout": (back, 2 * PACKED_BYTES),
    }


def random_stacks(dtype: torch.dtype) -> list[Tensor]:
    """The stacks of a layer, Gaussian with standard deviation 0.02."""
    stacks = []
    for seed, shape in enumerate(STACKS.values()):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        stacks.append((torch.randn(shape, device="cuda", generator=gen) * 0.02).to(dtype))
    return stacks


def run_weights(*, repeats: int = 11) -> Result:
    """One layer's expert stacks in BF16 and FP32. Raises MissingEnvironment where there is no CUDA GPU."""
    environment.require(hopper=False, vllm=False)
    bandwidth = copy_bandwidth()
    elements = sum(e * n * k for e, n, k in STACKS.values())
    series: list[Series] = []
    missing: dict[str, str] = {}
    times: dict[str, dict[int, float]] = {}
    shares: dict[str, dict[int, float]] = {}
    for bits, dtype in ((16, torch.bfloat16), (32, torch.float32)):
        named = calls(random_stacks(dtype))
        layer = {name: [partial(_all, fs)] for name, (fs, _) in named.items()}
        measured, failed = interleaved_us(layer, rounds=2, repeats=repeats)
        missing |= {f"{name}, {bits} bits": why for name, why in failed.items()}
        for name, us in measured.items():
            times.setdefault(name, {})[bits] = us
            shares.setdefault(name, {})[bits] = named[name][1] * elements / (us * 1e-6) / bandwidth
    series += [Series(name, "peer" if name == "copy" else "quads", "us", values) for name, values in times.items()]
    series += [Series(f"share of copy bandwidth: {n}", "check", "share", v) for n, v in shares.items()]
    return Result(
        "weights",
        "Weight kernels, expert stacks of one layer of Qwen3-30B-A3B",
        "bits of the master weights",
        tuple(series),
        environment.describe(),
        {"name": "qwen3-30b-a3b", "stacks": {n: list(s) for n, s in STACKS.items()}, "repeats": repeats},
        {"copy bandwidth, bytes/s": bandwidth},
        missing=missing,
    )


def _all(functions: Sequence[Callable[[], object]]) -> None:
    for f in functions:
        f()
