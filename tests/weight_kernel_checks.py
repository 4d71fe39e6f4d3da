# SPDX-License-Identifier: Apache-2.0
"""What the weight kernels promise, as functions of a device; run as a script it checks them in Triton's interpreter.

The interpreter has to be chosen before Triton is imported (TRITON_INTERPRET=1), hence a process of its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_quads.kernels import weights as kernels
from vllm_quads.kernels.kept import KeptQuantization
from vllm_quads.kernels.tensors import TensorDigests, digest_tensors
from vllm_quads.nvfp4 import PackedTensor, fake_quantize_weight, packed_digest, tensor_digest
from vllm_quads.nvfp4.errors import FormatError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(t: Tensor) -> Tensor:
    """The tensor as integers, so that -0 differs from 0 and NaNs compare."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]).cpu()


def same(a: Tensor, b: Tensor, what: str) -> None:
    """Fail unless two tensors are equal bit for bit."""
    assert a.shape == b.shape, (what, a.shape, b.shape)
    different = (bits(a) != bits(b)).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(f"{what}: {len(different)} of {a.numel()} differ, first at {at}: {a[at]} for {b[at]}")


def check(weight: Tensor, device: str, amax: Tensor | None = None) -> None:
    """All kernels on one weight or stack against the reference on the CPU."""
    on_device = weight.to(device)
    expected = PackedTensor.quantize(weight, amax=amax)
    if amax is None:
        amax = kernels._reference_amax(weight)
        same(kernels.weight_amax(on_device), amax, "amax")
    amax_d = amax.to(device)
    packed = kernels.quantize_stack(on_device, amax_d)
    same(packed.codes, expected.codes, "codes")
    same(packed.block_scales, expected.block_scales, "block scales")
    same(packed.decode_scale, expected.decode_scale, "decode scale")
    values = fake_quantize_weight(weight, amax=amax)
    same(kernels.fake_quantize_stack(on_device, amax_d), values, "values")
    both = kernels._empty_packed(on_device)
    same(kernels.fake_quantize_stack(on_device, amax_d, packed=both), values, "values beside codes")
    same(both.codes, expected.codes, "codes beside values")
    same(both.block_scales, expected.block_scales, "block scales beside values")
    same(kernels.dequantize_stack(packed, dtype=weight.dtype), values, "dequantized")
    same(kernels.digest_stack(packed), packed_digest(expected), "digest")
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).to(weight.dtype)
    expected_grad = grad * kernels.representable(weight, amax)
    same(kernels.clamp_gradient(grad.to(device), on_device, amax_d), expected_grad, "clamped gradient")


def random_stack(seed: int, *shape: int) -> Tensor:
    """Matrices whose scales, and those of their blocks, differ by orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g)
    w = w * (4.0 * torch.randn(*shape[:-1], 1, generator=g)).exp2()
    return w * torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))


def random_weights(device: str) -> None:
    """Stacks and single matrices of every dtype, with block counts that do not fill a tile."""
    for dtype in DTYPES:
        top = torch.finfo(dtype).max / 2
        for seed, shape in enumerate([(2, 19, 112), (5, 48), (2, 2, 3, 32)]):
            check(random_stack(seed, *shape).clamp(-top, top).to(dtype), device)


def edge_values(device: str) -> None:
    """Zeros of both signs, subnormals, largest values and magnitudes far below the block's amax."""
    tiny, huge = 9.183549615799121e-41, 3.3895313892515355e38
    for dtype in DTYPES:
        top = min(huge, torch.finfo(dtype).max)
        w = torch.zeros(4, 6, 32, dtype=torch.float64)
        w[0, 0, ::2] = -0.0
        w[0, 1, 0], w[0, 1, 1:8] = 1.0, -1e-30
        w[0, 2, 16:] = 1e-8
        w[1, 0, :] = tiny
        w[1, 1, 3] = -tiny * 3
        w[1, 2, 5] = 1e-38
        w[2, 0, 0], w[2, 0, 1], w[2, 1, :] = top, -top / 3, 1e-3
        w[2, 3, 7] = -top
        check(w.to(dtype), device)  # matrix 3 is zero


def ties(device: str) -> None:
    """Every midpoint of the E2M1 grid and its neighbours, for many block scales; midpoints of the BF16 grid."""
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    near = torch.cat([grid, grid * (1 + 2**-8), grid * (1 - 2**-8), -grid])[:32]
    scale = torch.arange(1, 65).view(-1, 1) / 8
    w = torch.stack([torch.cat([near.view(2, 16), torch.full((2, 1), 6.0)], dim=1)[:, 1:].reshape(1, 32)] * 64)[:, 0]
    check((w * scale).bfloat16(), device, torch.tensor(2688.0))
    u = torch.arange(0x3F800000, 0x3F800000 + 64 * 0x2000, 0x2000, dtype=torch.int32)
    check(torch.stack([u, u + 1, u - 1, u ^ 0x8000]).view(torch.float32), device)


def every_magnitude(device: str) -> None:
    """Every finite BF16 magnitude (on a CPU every 127th) as a block's amax: all roundings of the block scale."""
    step = 1 if device == "cuda" else 127
    m = torch.arange(0, 0x7F80, step, dtype=torch.int16).view(torch.bfloat16)
    m = m[: len(m) // 4 * 4].view(1, -1, 1).double()
    fractions = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).view(1, 1, 16)
    w = (m * fractions).bfloat16().view(1, -1, 64)
    check(w, device)
    for frozen in (1e-30, 1.0, 1e30):
        check(w, device, torch.tensor([frozen]))


def frozen_scales(device: str) -> None:
    """A given amax that is too small saturates, one that is too large underflows; zero means g = 1."""
    for dtype in DTYPES:
        w = random_stack(3, 4, 8, 64).to(dtype)
        check(w, device, torch.tensor([0.0, 1e-38, 1e-2, 1e30]))


def views(device: str) -> None:
    """Inputs and outputs may be halves of a larger stack, row ranges and K shards."""
    for dtype in DTYPES:
        w = random_stack(4, 2, 24, 128).to(dtype)
        whole = PackedTensor.quantize(w)
        out = kernels._empty_packed(torch.zeros(2, 48, 128, dtype=dtype, device=device))
        address = out.codes.data_ptr()
        values = torch.zeros(2, 48, 128, dtype=dtype, device=device)
        d = w.to(device)
        amax = kernels.weight_amax(d)
        for rows in (slice(0, 24), slice(24, 48)):
            part = kernels.QuantizedStack(out.codes[:, rows], out.block_scales[:, rows], out.decode_scale)
            kernels.quantize_stack(d, amax, out=part)
            same(part.codes, whole.codes, "codes of a half")
            same(part.block_scales, whole.block_scales, "block scales of a half")
            same(kernels.digest_stack(part), packed_digest(whole), "digest of a half")
            kernels.dequantize_stack(part, dtype=dtype, out=values[:, rows])
            same(values[:, rows], whole.dequantize(dtype), "values of a half")
        assert out.codes.data_ptr() == address
        shard = d[:, 4:20, 32:96]
        packed = kernels.quantize_stack(shard, amax)
        same(packed.codes, whole.codes[:, 4:20, 16:48], "codes of a shard")
        same(packed.block_scales, whole.block_scales[:, 4:20, 2:6], "block scales of a shard")
        kernels.fake_quantize_stack(shard, amax, out=values[:, 1:17, 16:80])
        same(values[:, 1:17, 16:80], whole.dequantize(dtype)[:, 4:20, 32:96], "values of a shard")
        placed = {"row_offset": 4, "k_offset": 32, "count_global": False}
        reference = PackedTensor(packed.codes.cpu(), packed.block_scales.cpu(), packed.decode_scale.cpu())
        same(kernels.digest_stack(packed, **placed), packed_digest(reference, **placed), "digest of a shard")


def shared_scales(device: str) -> None:
    """Weights that share a scale have one amax, that of all of them; FP32 masters round to BF16 first."""
    q, k = random_stack(5, 16, 64), random_stack(6, 8, 64)
    expected = torch.stack([kernels._reference_amax(q), kernels._reference_amax(k)]).amax()
    out = torch.full((), 7e7, device=device)
    same(kernels.weight_amax([q.to(device), k.to(device)], out=out), expected, "shared amax")
    assert kernels.weight_amax(torch.full((1, 16), 1 + 2**-8 + 2**-20, device=device)).item() == 1 + 2**-7


def not_finite(device: str) -> None:
    """NaN of any payload and Inf end up in the amax, in every dtype, and one check names weight and matrix."""
    for dtype in DTYPES:
        for bad in (float("nan"), float("inf"), -float("inf")):
            w = torch.ones(3, 4, 32, dtype=dtype)
            w[1, 2, 5] = bad
            amax = kernels.weight_amax(w.to(device))
            assert torch.isfinite(amax).tolist() == [True, False, True], (dtype, bad, amax)
            finite = kernels.FiniteCheck()
            finite.add("good", amax[:1])
            finite.add("layers.3.experts", amax)
            with pytest.raises(FormatError, match=r"layers.3.experts: holds NaN or Inf, matrix 1"):
                finite.check()
            finite.check()  # has forgotten
            values = kernels.fake_quantize_stack(w.to(device), amax)
            assert not torch.isfinite(values[1]).any()
    payload = torch.full((1, 16), -1, dtype=torch.int32).view(torch.float32)
    assert torch.isnan(kernels.weight_amax(payload.to(device)))


def every_code(device: str) -> None:
    """Every code with every block scale, foreign negative scales and NaN included, decodes as the reference does."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 32).view(torch.float8_e4m3fn)
    packed = PackedTensor(codes, scales, torch.tensor(1 / 3))
    stack = kernels.QuantizedStack(codes.to(device), scales.to(device), packed.decode_scale.to(device))
    for dtype in DTYPES:
        value, expected = kernels.dequantize_stack(stack, dtype=dtype).cpu(), packed.dequantize(dtype)
        assert torch.equal(value.isnan(), expected.isnan())
        same(value.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), "values")


def kept(device: str) -> None:
    """A kept quantization follows every change of its weight and of those that share the scale, and only changes."""
    if not KeptQuantization.available(torch.empty(0, device=device)):
        return  # the trainer keeps it another way where the kernels do not run
    for dtype, dense in ((torch.bfloat16, True), (torch.float32, False)):
        w, sibling = random_stack(8, 2, 4, 128).to(dtype), random_stack(9, 2, 2, 128).to(dtype)
        sources = [w.to(device), sibling.to(device)]
        kept = KeptQuantization(sources[0], dense=dense)

        def verify(kept: KeptQuantization, sources: list[Tensor], stale: int | None) -> None:
            amax = torch.stack([kernels._reference_amax(s.cpu()) for s in sources]).amax(dim=0)
            same(kept.amax, amax, "amax")
            if kept.values is not None:
                same(kept.values, fake_quantize_weight(sources[0].cpu(), amax=amax), "values")
            if kept.packed is not None:
                expected = PackedTensor.quantize(sources[0].cpu(), amax=amax)
                for a, b in zip(
                    kept.packed, (expected.codes, expected.block_scales, expected.decode_scale), strict=True
                ):
                    same(a, b, "packed")
            assert stale is None or int(kept._stale) == stale

        kept.renew(sources)
        verify(kept, sources, None)
        for source, index in ((0, (1, 2, 3)), (1, (0, 1, 127))):
            kept.renew_if_changed(sources)
            verify(kept, sources, 0)
            sources[source].data[index] *= -3.0  # one element, which no version counter sees
            kept.renew_if_changed(sources)
            verify(kept, sources, 1)
        sources[0].data *= 0.5
        values = None if dense else torch.empty_like(sources[0])
        kept.renew(sources, values=values)
        verify(kept, sources, None)
        if values is not None:
            same(values, fake_quantize_weight(sources[0].cpu(), amax=kept.amax.cpu()), "values beside what is kept")


def kept_by_parts(device: str) -> None:
    """A check of a part of the tiles notices a changed element within 16 turns, and once only."""
    if not KeptQuantization.available(torch.empty(0, device=device)):
        return
    w = random_stack(10, 2, 32, 256).bfloat16().to(device)
    kept = KeptQuantization(w, dense=True)
    kept.renew([w])
    for element in (16383,):
        w.view(-1).data[element] += 4.0
        stale = []
        for _ in range(16):
            kept._check([w], None, *kept._next_part(1 << 30))
            stale.append(int(kept._stale))
        assert sum(stale) == 1, stale
        same(kept.values, fake_quantize_weight(w.cpu()), "values")


def tensors(device: str) -> None:
    """Digests of tensors of all forms and sizes at once: scalars, rows of words that are not full, odd bytes, views."""
    g = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    given = [
        random(), random(3), random(64, dtype=torch.float32), random(0, 4), random(513, 5, dtype=torch.float16),
        random(2, 3, 1700), random(65, 64).t(), random(9001)[1:7], torch.arange(5, dtype=torch.uint8), random(20, 2048),
        random(1, dtype=torch.float64), random(40, 1024, dtype=torch.float32),
    ]  # fmt: skip
    expected = torch.stack([tensor_digest(t) for t in given])
    same(digest_tensors([t.to(device) if t.is_contiguous() else t.T.to(device).T for t in given]), expected, "digests")
    assert len(set(expected.tolist())) == len(given)
    collected = TensorDigests()
    for i, t in enumerate(given[:6]):
        collected.add(str(i), t.to(device))
    collected.add_all((str(i), t.to(device)) for i, t in enumerate(given) if i >= 6)
    assert collected.read() == {str(i): value % 2**64 for i, value in enumerate(expected.tolist())}
    assert collected.read() is collected.read()  # the second one waits for nothing
    assert digest_tensors([]).numel() == 0


CHECKS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        random_weights, edge_values, ties, every_magnitude, frozen_scales, views, shared_scales, not_finite, every_code,
        kept, kept_by_parts, tensors,
    )
}  # fmt: skip


def main() -> None:
    """Run all checks on the CPU and print {name: traceback or null}."""
    assert kernels._kernels() is not None
    results: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function("cpu")
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
