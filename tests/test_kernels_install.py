# SPDX-License-Identifier: Apache-2.0
"""Installing weights in one pass gives what quantizing, arranging and digesting one after the other give.

On the CPU the CUDA source runs in `tests/cuda_emulation`, and the torch path as it is; on a GPU the kernel itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_kernels_emulated import _cuda_include
from torch import Tensor

from vllm_quads.kernels import _native, install, layout
from vllm_quads.kernels.install import BAD_AMAX, BAD_GLOBAL, BAD_SCALE, install_packed, install_quantized, stack_amax
from vllm_quads.kernels.layout import arrange, arrange_into, arranged_shape, row_order, unarrange
from vllm_quads.kernels.weights import QuantizedStack
from vllm_quads.nvfp4 import FormatError, PackedTensor, packed_digest

SHAPES = [
    (3, True, 48, 64),
    (2, False, 200, 256),
    (2, True, 80, 48),
    (1, False, 72, 144),
    (2, False, 64, 768),
    (1, True, 32, 2048),
    (1, False, 40, 3072),
]
"""Experts, gate and up, rows of a part, K: what fills no tile, whole and partial groups, all launch shapes."""


class Emulated(NamedTuple):
    """Host libraries of the CUDA sources."""

    quads_install: Any
    quads_unarrange: Any


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """csrc/install.cu and csrc/unarrange.cu as host libraries."""
    compiler, include = shutil.which("g++"), _cuda_include()
    if compiler is None or include is None:
        pytest.skip("needs g++ and the CUDA headers")
    directory: Path = tmp_path_factory.mktemp("install")
    shutil.copy(Path(__file__).parent / "cuda_emulation" / "common.cuh", directory)
    for name in ("arrange_math", "digest_math", "nvfp4_math", "transpose", "weights"):
        shutil.copy(_native.source_directory() / f"{name}.cuh", directory)
    shared = "extern __shared__ uint64_t shared[];"
    memory = "uint64_t* const shared = reinterpret_cast<uint64_t*>(emulation::dynamic_shared.data());"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", f"-I{include}"]
    processes = []
    for name in ("install", "unarrange"):
        text = (_native.source_directory() / f"{name}.cu").read_text()
        assert text.count(shared) == (name == "install")
        (directory / f"{name}.cpp").write_text(text.replace(shared, memory))
        command = [compiler, *flags, str(directory / f"{name}.cpp"), "-o", str(directory / f"{name}.so")]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    load = [ctypes.CDLL(str(directory / f"{name}.so")) for name in ("install", "unarrange")]
    return Emulated(load[0].quads_install, load[1].quads_unarrange)


@pytest.fixture(
    params=[
        "torch",
        "emulated",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
        ),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the functions run: torch, the emulated kernel, the GPU."""
    if request.param == "emulated":
        library = request.getfixturevalue("emulated")
        for module in (install, layout):
            monkeypatch.setattr(module, "on_hopper", lambda t: True)
        monkeypatch.setattr(_native, "library", lambda: library)
        monkeypatch.setattr(_native, "stream", lambda: None)
        monkeypatch.setattr(_native, "on_device", lambda d: contextlib.nullcontext())
    return "cuda" if request.param == "cuda" else "cpu"


class Sinks:
    """Outputs of a call, poisoned, or with values that are added to."""

    def __init__(self, experts: int, parts: int, rows: int, k: int, device: str) -> None:
        self.out = torch.full((experts, *arranged_shape(parts * rows, k)), 0xA5, dtype=torch.uint8, device=device)
        self.decode = torch.full((experts, parts), 7.0, device=device)
        self.digests = torch.full((experts * parts,), 2**62 + 5, dtype=torch.int64, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)

    def arguments(self) -> dict[str, Tensor]:
        return {"decode": self.decode, "digests": self.digests, "status": self.status}

    def require(self, want: PackedTensor, gate_up: bool, status: int = 0, **offsets: Any) -> None:
        """Fail unless everything is as the reference has it."""
        codes, scales = want.codes.flatten(1, 2), want.block_scales.view(torch.uint8).flatten(1, 2)
        order = row_order(codes.shape[1], gate_up=gate_up)
        assert torch.equal(self.out.cpu(), arrange(codes, scales.view(torch.float8_e4m3fn), order))
        assert torch.equal(self.decode.cpu().view(torch.int32), want.decode_scale.view(torch.int32))
        assert torch.equal(self.digests.cpu(), packed_digest(want, **offsets).flatten() + (2**62 + 5))
        assert int(self.status) == status


def random_packed(experts: int, parts: int, rows: int, k: int, seed: int = 0) -> PackedTensor:
    """Codes and scales of any value that the format has, subnormal scales and zeros included."""
    gen = torch.Generator().manual_seed(seed)
    lead = (experts, parts, rows)
    scales = torch.randint(0, 127, (*lead, k // 16), generator=gen, dtype=torch.uint8)
    scales[..., :4].clamp_(min=8)  # words without a small scale are converted at once
    codes = torch.randint(0, 256, (*lead, k // 2), generator=gen, dtype=torch.uint8)
    decode = torch.rand(experts, parts, generator=gen) + 1e-3
    return PackedTensor(codes, scales.view(torch.float8_e4m3fn), decode)


def moved(t: PackedTensor, device: str) -> QuantizedStack:
    return QuantizedStack(t.codes.to(device), t.block_scales.to(device), t.decode_scale.to(device))


@pytest.mark.parametrize(("experts", "gate_up", "rows", "k"), SHAPES)
def test_packed(device: str, experts: int, gate_up: bool, rows: int, k: int) -> None:
    """Prepared bytes, decode scales and digests of packed weights; without digests the same bytes."""
    parts = 2 if gate_up else 1
    want = random_packed(experts, parts, rows, k)
    sinks = Sinks(experts, parts, rows, k, device)
    install_packed(moved(want, device), sinks.out, gate_up=gate_up, **sinks.arguments())
    sinks.require(want, gate_up)
    sinks.out.fill_(0xA5)
    install_packed(moved(want, device), sinks.out, gate_up=gate_up)
    sinks.require(want, gate_up)


@pytest.mark.parametrize(
    ("gate_up", "cut"), [(True, (16, 32, 0, 96)), (False, (0, 80, 32, 48)), (False, (40, 40, 0, 96))]
)
def test_shards(device: str, gate_up: bool, cut: tuple[int, int, int, int]) -> None:
    """A shard of a stack, a view with gaps, gets the bytes of its copy, and a digest that says where it lies."""
    row, rows, column, columns = cut
    whole = random_packed(2, 2 if gate_up else 1, 80, 96)
    shard = moved(whole, device)
    raw = shard.block_scales.view(torch.uint8)
    part = QuantizedStack(
        shard.codes.narrow(2, row, rows).narrow(3, column // 2, columns // 2),
        raw.narrow(2, row, rows).narrow(3, column // 16, columns // 16).view(torch.float8_e4m3fn),
        shard.decode_scale,
    )
    sinks = Sinks(2, whole.codes.shape[1], rows, columns, device)
    offsets = {"row_offset": row, "k_offset": column, "count_global": row == 0}
    install_packed(part, sinks.out, gate_up=gate_up, **sinks.arguments(), **offsets)
    copy = PackedTensor(part.codes.cpu().contiguous(), part.block_scales.cpu().contiguous(), part.decode_scale.cpu())
    sinks.require(copy, gate_up, **offsets)


@pytest.mark.parametrize("gate_up", [True, False])
def test_damage_is_reported(device: str, gate_up: bool) -> None:
    """One NaN block scale, one negative one, one bad global scale: each sets its bit, added to those before."""
    for damage, bit in (("nan", BAD_SCALE), ("negative", BAD_SCALE), ("inf", BAD_GLOBAL), ("zero", BAD_GLOBAL)):
        packed = moved(random_packed(2, 2 if gate_up else 1, 24, 80), device)
        if damage in ("inf", "zero"):
            packed.decode_scale[1, -1] = torch.inf if damage == "inf" else 0.0
        else:
            packed.block_scales.view(torch.uint8)[1, -1, 23, 4] = 0x7F if damage == "nan" else 0x80
        sinks = Sinks(2, packed.codes.shape[1], 24, 80, device)
        sinks.status.fill_(8)
        install_packed(packed, sinks.out, gate_up=gate_up, status=sinks.status)
        assert int(sinks.status) == 8 | bit, damage


def weights(experts: int, parts: int, rows: int, k: int, seed: int = 0) -> Tensor:
    """Weights with blocks of zeros, blocks far below the largest, and values in all binades."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(experts, parts, rows, k, generator=gen) * 0.02
    w *= torch.exp2(torch.randint(-12, 3, (experts, parts, rows, 1), generator=gen).float())
    w[:, :, 3, :16] = 0.0
    w[:, :, 5, 16:32] = -0.0
    w[:, :, 7, 7] = 1e-30
    w[:, :, 9, :16] *= 1e-37
    return w.to(torch.bfloat16)


@pytest.mark.parametrize(("experts", "gate_up", "rows", "k"), SHAPES)
def test_quantized(device: str, experts: int, gate_up: bool, rows: int, k: int) -> None:
    """BF16 weights: amax over what shares a scale, then the bytes, scales and digests of the reference; a frozen amax,
    smaller than the live one, saturates as the reference does."""
    parts = 2 if gate_up else 1
    w = weights(experts, parts, rows, k)
    amax = torch.zeros(experts, device=device)
    assert stack_amax(w.to(device), amax) is amax
    assert torch.equal(amax.cpu(), w.float().abs().amax(dim=(1, 2, 3)))
    for each in (amax, amax * 0.3, (amax * 1e-20)[:, None].expand(experts, parts)):
        shared = each.cpu() if each.dim() == 2 else each.cpu()[:, None].expand(experts, parts)
        want = PackedTensor.quantize(w, amax=shared.contiguous())
        sinks = Sinks(experts, parts, rows, k, device)
        install_quantized(w.to(device), each, sinks.out, gate_up=gate_up, **sinks.arguments())
        sinks.require(want, gate_up)


@pytest.mark.parametrize(("experts", "gate_up", "rows", "k"), SHAPES)
def test_layout_and_back(device: str, experts: int, gate_up: bool, rows: int, k: int) -> None:
    """The layout alone, and its inverse."""
    packed = moved(random_packed(experts, 1, rows * (2 if gate_up else 1), k), device)
    codes, scales = packed.codes.flatten(1, 2), packed.block_scales.view(torch.uint8).flatten(1, 2)
    out = torch.full((experts, *arranged_shape(codes.shape[1], k)), 0xA5, dtype=torch.uint8, device=device)
    arrange_into(codes, scales.view(torch.float8_e4m3fn), out, gate_up=gate_up)
    order = row_order(codes.shape[1], gate_up=gate_up)
    assert torch.equal(out.cpu(), arrange(codes.cpu(), scales.cpu().view(torch.float8_e4m3fn), order))
    back = unarrange(out, codes.shape[1], k, gate_up=gate_up)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1].view(torch.uint8), scales)


@pytest.mark.parametrize(("gate_up", "cut"), [(True, (16, 32, 0, 96)), (False, (0, 80, 32, 48))])
def test_quantized_shards(device: str, gate_up: bool, cut: tuple[int, int, int, int]) -> None:
    """A shard of BF16 weights, a view with gaps, with the amax of the whole."""
    row, rows, column, columns = cut
    w = weights(2, 2 if gate_up else 1, 80, 96)
    amax = stack_amax(w.to(device), torch.zeros(2, device=device))
    part = w.to(device).narrow(2, row, rows).narrow(3, column, columns)
    sinks = Sinks(2, w.shape[1], rows, columns, device)
    offsets = {"row_offset": row, "k_offset": column, "count_global": row == 0}
    install_quantized(part, amax, sinks.out, gate_up=gate_up, **sinks.arguments(), **offsets)
    want = PackedTensor.quantize(part.cpu().contiguous(), amax=amax.cpu()[:, None].expand(2, w.shape[1]).contiguous())
    sinks.require(want, gate_up, **offsets)


def test_nan_and_inf_of_weights_are_reported(device: str) -> None:
    """Live: the amax is not finite; frozen: the block's scale is NaN. Both set their bits."""
    for value in (torch.nan, torch.inf, -torch.inf):
        w = weights(2, 1, 40, 64)
        w[1, 0, 39, 63] = value
        amax = stack_amax(w.to(device), torch.zeros(2, device=device))
        assert torch.isfinite(amax).tolist() == [True, False]
        sinks = Sinks(2, 1, 40, 64, device)
        install_quantized(w.to(device), amax, sinks.out, gate_up=False, status=sinks.status)
        assert int(sinks.status) & (BAD_AMAX | BAD_SCALE) == BAD_AMAX | BAD_SCALE
        sinks.status.zero_()
        install_quantized(w.to(device), torch.ones(2, device=device), sinks.out, gate_up=False, status=sinks.status)
        assert int(sinks.status) == BAD_SCALE


@pytest.mark.parametrize("gate_up", [True, False])
def test_one_destination_for_many_refits(device: str, gate_up: bool) -> None:
    """What a destination remembers of stacks of one form is their form alone: other addresses, sinks, strides, shards
    and kinds of weights after them give what calls of their own give, and what does not fit is refused."""
    parts = 2 if gate_up else 1
    sinks = Sinks(2, parts, 48, 64, device)
    destination = install.Destination(sinks.out, gate_up=gate_up, place=install.ShardPlace(16, 32, False))
    offsets = {"row_offset": 16, "k_offset": 32, "count_global": False}
    floats = weights(2, parts, 48, 64)
    amax = stack_amax(floats.to(device), torch.zeros(2, device=device))
    shared = amax.cpu()[:, None].expand(2, parts).contiguous()
    gaps = torch.zeros(2, parts, 60, 32, dtype=torch.uint8, device=device)[:, :, :48]
    kept = install.Sinks()
    for number, case in enumerate(("first", "same sinks", "gaps", "stack", "odd", "float", "float by part", "again")):
        weight: Any = moved(want := random_packed(2, parts, 48, 64, seed=number), device)
        own_amax = None
        if case == "gaps":
            weight = weight._replace(codes=gaps.copy_(weight.codes))
        elif case == "odd":
            room = torch.empty(weight.codes.numel() + 1, dtype=torch.uint8, device=device)
            weight = weight._replace(codes=room[1:].view(weight.codes.shape).copy_(weight.codes))
        elif case == "stack":
            codes, raw = weight.codes.flatten(1, 2), weight.block_scales.view(torch.uint8).flatten(1, 2)
            scalars = weight.decode_scale if gate_up else weight.decode_scale[:, 0]
            weight = QuantizedStack(codes, raw.view(torch.float8_e4m3fn), scalars)
        elif case.startswith("float"):
            want, weight = PackedTensor.quantize(floats, amax=shared), floats.to(device)
            own_amax = amax if case == "float" else shared.to(device)
        if case != "same sinks":
            sinks.decode, sinks.digests = torch.empty_like(sinks.decode), torch.empty_like(sinks.digests)
            kept = install.Sinks(sinks.decode, sinks.digests, sinks.status)
        sinks.out.fill_(0xA5)
        sinks.digests.fill_(2**62 + 5)
        destination.install(weight, own_amax, kept)
        sinks.require(want, gate_up, **offsets)
    packed = moved(random_packed(2, parts, 48, 64), device)
    with pytest.raises(FormatError, match="do not belong together"):
        destination.install(packed._replace(decode_scale=torch.ones(3, device=device)), None, kept)
    with pytest.raises(FormatError, match="do not belong together"):
        destination.install(packed._replace(block_scales=packed.block_scales[:, :, :40]), None, kept)
    with pytest.raises(FormatError, match="digests: is torch.int64"):
        destination.install(packed, None, install.Sinks(digests=sinks.digests[:1].repeat(9)))


def test_refusals() -> None:
    """What does not fit together is refused before anything is written."""
    p = random_packed(2, 2, 32, 64)
    packed = moved(p, "cpu")
    sinks = Sinks(2, 2, 32, 64, "cpu")
    before = sinks.out.clone()
    with pytest.raises(FormatError, match="expected \\[E, 1, N, K\\]"):
        install_packed(packed, sinks.out, gate_up=False)
    with pytest.raises(FormatError, match="prepared weights"):
        install_packed(packed, sinks.out[:1], gate_up=True)
    with pytest.raises(FormatError, match="do not belong together"):
        install_packed(packed._replace(decode_scale=torch.ones(2)), sinks.out, gate_up=True)
    with pytest.raises(FormatError, match="digests: is torch.int64 \\(3,\\)"):
        install_packed(packed, sinks.out, gate_up=True, digests=sinks.digests[:3])
    with pytest.raises(FormatError, match="amax is torch.float32 \\(3,\\)"):
        install_quantized(weights(2, 2, 32, 64), torch.ones(3), sinks.out, gate_up=True)
    with pytest.raises(FormatError, match="amax is torch.float32 \\(3,\\)"):
        stack_amax(weights(2, 2, 32, 64), torch.ones(3))
    assert torch.equal(sinks.out, before)
