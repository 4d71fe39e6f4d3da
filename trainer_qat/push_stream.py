# SPDX-License-Identifier: Apache-2.0
"""The model's weights as a refit wants them: stacks of experts whole, layer by layer, quantized on the way.

A 30B mixture of experts is a few hundred tensors instead of tens of thousands. Each quantized weight is quantized once
(or taken from the packed cache), digested, and handed over; nothing is kept. Under FSDP2 one parameter at a time is
gathered, and every rank has to iterate; ranks without an engine only take part in that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cached_property

import torch
from torch import Tensor

from trainer_qat.cache import CacheMode
from trainer_qat.inventory import Weight
from trainer_qat.payload import Payload, full_tensor, plain_dtype
from trainer_qat.prepare import quantizer_of
from trainer_qat.quantizer import WeightQuantizer, full_amax
from trainer_qat.ranks import Ranks
from trainer_qat.stillness import Stillness
from trainer_qat.wire import UnitDigests, Wire
from vllm_quads.kernels.weights import FiniteCheck, QuantizedStack, quantize_stack, weight_amax
from vllm_quads.nvfp4 import MismatchError, canonical_name, scale_group, unit_fingerprint
from vllm_quads.refit import TensorSpec


class PushStream:
    """One push of a payload: `measure` and `specs`, then `check`, then the tensors, then `digests`."""

    def __init__(self, payload: Payload, *, packed: bool = True, digest: bool = True) -> None:
        """Nothing is computed yet. packed: NVFP4, else BF16; digest: compute digests while sending."""
        self._payload = payload
        self._packed = packed
        self._digest = digest
        self._amax: dict[str, Tensor] = {}
        self._ready: dict[str, QuantizedStack] = {}
        self._check: FiniteCheck | None = None
        self._still: Stillness | None = None
        self._digests = UnitDigests()
        self._kept: dict[str, WeightQuantizer] = {}
        self.sharded = payload.sharded
        """True if parameters are sharded over ranks, so that all of them have to iterate, to the end."""
        if not self.sharded:
            for weight in payload.weights():
                quantizer = quantizer_of(weight)
                if quantizer is not None and quantizer.state.cache_mode() is CacheMode.PACKED:
                    self._kept[quantizer.name] = quantizer

    @cached_property
    def _parameters(self) -> list[tuple[str, Tensor, Weight | None]]:
        """What is sent, in order."""
        return [(name, p, self._payload.weight(name)) for name, p in self._payload.parameters()]

    @cached_property
    def _buffers(self) -> list[tuple[str, Tensor]]:
        return list(self._payload.buffers())

    @property
    def resident(self) -> bool:
        """True if weights that are not quantized are sent as they lie in the model; False if some are gathered, cast or
        merged first."""
        plain = (p for _, p, weight in self._parameters if weight is None)
        return not self.sharded and not self._payload.merges and all(p.dtype == plain_dtype(p.dtype) for p in plain)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor, in the order of sending; computes and gathers nothing.

        Raises MismatchError if the model's checkpoint layout does not hold all quantized matrices.
        """
        specs: dict[str, TensorSpec] = {}
        sent: list[str] = []
        for name, parameter, weight in self._parameters:
            if weight is not None:
                sent.append(name)
                specs |= self._wire(weight).packed_specs if self._packed else self._wire(weight).float_specs
                continue
            for disk, spec in self._payload.plain_specs(name, parameter).items():
                if canonical_name(disk) in self._payload.quantized:
                    raise MismatchError(f"{disk}: is quantized, but {name} is not; this model family is not supported")
                specs[disk] = TensorSpec(spec.shape, plain_dtype(spec.dtype))
        missing = self._payload.missing(sent)
        if missing:
            raise MismatchError(
                f"{missing[0]}: is quantized, but no parameter of the model holds it ({len(missing)} such matrices); "
                f"this model family is not supported"
            )
        for name, buffer in self._buffers:
            specs |= self._payload.plain_specs(name, buffer)
        return specs

    @torch.no_grad()
    def measure(self) -> None:
        """Start to compute the amax of every quantized weight. A collective of all ranks under FSDP2.

        Weights with a packed cache are brought up to date instead, which computes it on the way.
        """
        self._payload.reshard()
        self._still = Stillness(self._payload.model, Ranks.of(self._payload.model))
        self._check = FiniteCheck()
        groups: dict[str, list[Tensor]] = {}
        for weight in self._payload.weights():
            tensor = weight.tensor
            if self._take_kept(weight):
                continue
            own = full_amax(tensor, weight.name) if self.sharded else weight_amax(tensor.detach())
            self._check.add(weight.name, own)
            frozen = self._payload.frozen.get(weight.name)
            self._amax[weight.name] = own if frozen is None else frozen.to(own.device)
            if frozen is None and own.dim() == 0:
                groups.setdefault(scale_group(weight.name), []).append(own)
        for weight in self._payload.weights():
            group = groups.get(scale_group(weight.name), [])
            if len(group) > 1:
                self._amax[weight.name] = torch.stack(group).amax(dim=0)

    def _take_kept(self, weight: Weight) -> bool:
        """Note the packed cache of a weight that shares its scale with no other; False if there is none, or no use."""
        quantizer = self._kept.get(weight.name)
        if quantizer is None or len(quantizer.sources(weight.tensor)) > 1 or not (self._packed or self._digest):
            return False
        kept, amax = quantizer.kept(weight.tensor)
        self._ready[weight.name] = QuantizedStack(kept.codes, kept.block_scales, kept.decode_scale)
        assert self._check is not None
        self._check.add(weight.name, amax)
        return True

    @torch.no_grad()
    def check(self) -> None:
        """Wait once for what `measure` has started, or start it. Raises FormatError on NaN or Inf, by name."""
        if self._check is None:
            self.measure()
        assert self._check is not None
        self._check.check()

    @torch.no_grad()
    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Every tensor under its wire name (see `refit.Manifest`). Call `check` first.

        If sharded, RefitError is raised at the end, on all ranks, if one of them has changed a weight since `measure`.
        """
        for name, parameter, weight in self._parameters:
            if weight is not None:
                yield from self._weight_tensors(weight, full_tensor(parameter))
                continue
            full = self._payload.merged(name, full_tensor(parameter))
            for disk, tensor in self._payload.named(name, full).items():
                yield disk, tensor.to(plain_dtype(tensor.dtype)).contiguous()
        for name, buffer in self._buffers:
            for disk, tensor in self._payload.named(name, full_tensor(buffer)).items():
                yield disk, tensor.contiguous()
        self._end()

    @torch.no_grad()
    def follow(self) -> Generator[tuple[str, Tensor], None, None]:
        """Take part in what `tensors` does on a rank with an engine; gives nothing worth keeping."""
        for name, parameter, weight in self._parameters:
            full = full_tensor(parameter)
            # An adapter's matrices are gathered as well.
            yield name, full if weight is not None else self._payload.merged(name, full)
        for name, buffer in self._buffers:
            yield name, full_tensor(buffer)
        self._end()

    def _end(self) -> None:
        """Of sharded weights copies were sent, of which the last has been made: later changes do no harm."""
        if self.sharded and self._still is not None:
            self._still.check()

    def check_unchanged(self) -> None:
        """Raise RefitError, by name, if a weight was changed since `measure`. Of sharded weights `tensors` says so, at
        its end, on all ranks."""
        if not self.sharded and self._still is not None:
            self._still.check()

    def digests(self) -> dict[str, int] | None:
        """Digest of every unit that has been sent, or None if none were asked for; waits for the device once."""
        return self._digests.read() if self._digest else None

    def fingerprint(self) -> str | None:
        """Fingerprint of what has been sent, or None if no digests were asked for."""
        digests = self.digests()
        return None if digests is None else unit_fingerprint(digests)

    # -- one quantized weight --------------------------------------------------------------------------------------

    def _wire(self, weight: Weight) -> Wire:
        return self._payload.wire(weight)

    def _weight_tensors(self, weight: Weight, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        wire = self._wire(weight)
        if self._packed or self._digest:
            stack = self._quantize(weight, full)
            decode = wire.decode_scales(stack)
            if self._digest:
                self._digests.add(wire, wire.digests(stack, decode))
            if self._packed:
                yield from wire.packed(stack, decode).items()
        if not self._packed:
            yield wire.name, full.to(torch.bfloat16).contiguous()

    def _quantize(self, weight: Weight, full: Tensor) -> QuantizedStack:
        if weight.name in self._ready:
            return self._ready[weight.name]
        quantizer = self._kept.get(weight.name)
        if quantizer is not None:
            kept = quantizer.packed(weight.tensor)
            return QuantizedStack(kept.codes, kept.block_scales, kept.decode_scale)
        return quantize_stack(full, self._amax[weight.name])


__all__ = ["PushStream"]
