# SPDX-License-Identifier: Apache-2.0
"""The model's weights as a refit wants them: stacks of experts whole, layer by layer, quantized on the way.

A 30B mixture of experts is a few hundred tensors instead of tens of thousands. Each quantized weight is quantized once
(or taken from the packed cache), digested, and handed over; nothing is kept. Under FSDP2 one parameter at a time is
gathered, and every rank has to iterate; ranks without an engine only take part in that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from trainer_qat.cache import CacheMode
from trainer_qat.inventory import Weight
from trainer_qat.payload import Payload, full_tensor, plain_dtype
from trainer_qat.prepare import quantizers_of
from trainer_qat.quantizer import WeightQuantizer, full_amax
from vllm_quads.kernels.weights import FiniteCheck, QuantizedStack, digest_stack, quantize_stack, weight_amax
from vllm_quads.nvfp4 import (
    BLOCK_SIZE,
    MismatchError,
    canonical_name,
    name_weights,
    scale_group,
    unit_fingerprint,
    unit_of,
)
from vllm_quads.refit import TensorSpec


class PushStream:
    """One push of a payload: `specs`, then `check`, then the tensors, then `digests`."""

    def __init__(self, payload: Payload, *, packed: bool = True, digest: bool = True) -> None:
        """Nothing is computed yet. packed: NVFP4, else BF16; digest: compute digests while sending."""
        self._payload = payload
        self._packed = packed
        self._digest = digest
        self._amax: dict[str, Tensor] = {}
        self._units: dict[str, Tensor] = {}
        self._kept: dict[str, WeightQuantizer] = {}
        self._sharded = payload.sharded
        if not self._sharded:
            for _, _, quantizer in quantizers_of(payload.model):
                if quantizer.state.cache_mode() is CacheMode.PACKED:
                    self._kept[quantizer.name] = quantizer

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor, in the order of sending; computes and gathers nothing.

        Raises MismatchError if the model's checkpoint layout does not hold all quantized matrices.
        """
        specs: dict[str, TensorSpec] = {}
        found: set[str] = set()
        for name, parameter in self._payload.parameters():
            weight = self._payload.weight(name)
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            if weight is not None:
                found |= weight.matrices.keys()
                specs |= self._weight_specs(weight)
                continue
            for disk, tensor in self._payload.named(name, meta).items():
                if canonical_name(disk) in self._payload.quantized:
                    raise MismatchError(f"{disk}: is quantized, but {name} is not; this model family is not supported")
                specs[disk] = TensorSpec(tuple(tensor.shape), plain_dtype(tensor))
        missing = sorted(set(self._payload.quantized.shapes) - found)
        if missing:
            raise MismatchError(
                f"{missing[0]}: is quantized, but no parameter of the model holds it ({len(missing)} such matrices); "
                f"this model family is not supported"
            )
        for name, buffer in self._payload.buffers():
            meta = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
            specs |= {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self._payload.named(name, meta).items()}
        return specs

    @torch.no_grad()
    def check(self) -> None:
        """The amax of every quantized weight, with one wait for the device. Raises FormatError on NaN or Inf, by name.

        A collective of all ranks under FSDP2.
        """
        self._payload.reshard()
        check = FiniteCheck()
        groups: dict[str, list[Tensor]] = {}
        for weight in self._payload.weights():
            tensor = weight.tensor
            own = full_amax(tensor, weight.name) if self._sharded else weight_amax(tensor.detach())
            check.add(weight.name, own)
            frozen = self._payload.frozen.get(weight.name)
            self._amax[weight.name] = own if frozen is None else frozen.to(own.device)
            if frozen is None and own.dim() == 0:
                groups.setdefault(scale_group(weight.name), []).append(own)
        check.check()
        for weight in self._payload.weights():
            group = groups.get(scale_group(weight.name), [])
            if len(group) > 1:
                self._amax[weight.name] = torch.stack(group).amax(dim=0)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its wire name (see `refit.Manifest`). Call `check` first."""
        for name, parameter in self._payload.parameters():
            weight = self._payload.weight(name)
            if weight is None:
                full = self._payload.merged(name, full_tensor(parameter))
                for disk, tensor in self._payload.named(name, full).items():
                    yield disk, tensor.to(plain_dtype(tensor)).contiguous()
                continue
            yield from self._weight_tensors(weight, full_tensor(parameter))
        for name, buffer in self._payload.buffers():
            for disk, tensor in self._payload.named(name, full_tensor(buffer)).items():
                yield disk, tensor.contiguous()

    @torch.no_grad()
    def follow(self) -> Generator[tuple[str, Tensor], None, None]:
        """Take part in the gathering that `tensors` does on a rank with an engine; gives nothing worth keeping."""
        for name, parameter in self._payload.parameters():
            full = full_tensor(parameter)
            # An adapter's matrices are gathered as well.
            yield name, full if self._payload.weight(name) is not None else self._payload.merged(name, full)
        for name, buffer in self._payload.buffers():
            yield name, full_tensor(buffer)

    def digests(self) -> dict[str, int] | None:
        """Digest of every unit that has been sent, or None if none were asked for; waits for the device once."""
        if not self._digest:
            return None
        values = torch.stack(list(self._units.values())).tolist() if self._units else []
        return {unit: value % (1 << 64) for unit, value in zip(self._units, values, strict=True)}

    def fingerprint(self) -> str | None:
        """Fingerprint of what has been sent, or None if no digests were asked for."""
        digests = self.digests()
        return None if digests is None else unit_fingerprint(digests)

    # -- one quantized weight --------------------------------------------------------------------------------------

    def _weight_specs(self, weight: Weight) -> dict[str, TensorSpec]:
        *lead, n, k = weight.tensor.shape
        name = _wire_name(weight)
        if not self._packed:
            return {name: TensorSpec((*lead, n, k), torch.bfloat16)}
        module = name.removesuffix(".weight")
        return {
            f"{module}.weight_scale_2": TensorSpec(self._scalars(weight), torch.float32),
            f"{module}.weight_scale": TensorSpec((*lead, n, k // BLOCK_SIZE), torch.float8_e4m3fn),
            f"{module}.weight": TensorSpec((*lead, n, k // 2), torch.uint8),
        }

    def _weight_tensors(self, weight: Weight, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = _wire_name(weight)
        stack = self._quantize(weight, full) if self._packed or self._digest else None
        if stack is not None and self._digest:
            self._add_digest(weight, stack)
        if not self._packed:
            yield name, full.to(torch.bfloat16).contiguous()
            return
        assert stack is not None
        module = name.removesuffix(".weight")
        scalars = self._scalars(weight)
        decode = stack.decode_scale
        # The largest comes last: what arrives before a layer is complete has to be copied.
        yield f"{module}.weight_scale_2", decode[:, None].expand(scalars) if len(scalars) == 2 else decode
        yield f"{module}.weight_scale", stack.block_scales
        yield f"{module}.weight", stack.codes

    def _quantize(self, weight: Weight, full: Tensor) -> QuantizedStack:
        quantizer = self._kept.get(weight.name)
        if quantizer is not None:
            kept = quantizer.packed(weight.tensor)
            return QuantizedStack(kept.codes, kept.block_scales, kept.decode_scale)
        return quantize_stack(full, self._amax[weight.name])

    @staticmethod
    def _scalars(weight: Weight) -> tuple[int, ...]:
        """Shape of the global scales: [E, 2] for gate and up, [E] for down, a scalar for a matrix."""
        shape = weight.tensor.shape
        if len(shape) == 2:
            return ()
        parts = len(weight.matrices) // shape[0]
        return (shape[0], parts) if parts > 1 else (shape[0],)

    def _add_digest(self, weight: Weight, stack: QuantizedStack) -> None:
        names = list(weight.matrices)
        codes, scales, decode = stack
        if codes.dim() == 3:  # expert by expert, gate and up: [E, P, N, ...]
            experts = codes.shape[0]
            lead = (experts, len(names) // experts)
            codes, scales = codes.unflatten(1, (lead[1], -1)), scales.unflatten(1, (lead[1], -1))
            decode = decode[:, None].expand(lead).contiguous()
        digest = digest_stack(QuantizedStack(codes, scales, decode))
        total = (digest.flatten() * name_weights(names, digest.device)).sum()
        unit = unit_of(names[0])
        self._units[unit] = self._units[unit] + total if unit in self._units else total


def _wire_name(weight: Weight) -> str:
    """`...experts.gate_up_proj` for a stack, `...q_proj.weight` for a matrix."""
    return weight.name if weight.tensor.dim() == 3 else f"{weight.name}.weight"


__all__ = ["PushStream"]
