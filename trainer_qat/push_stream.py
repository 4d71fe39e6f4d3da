# SPDX-License-Identifier: Apache-2.0
"""The model's weights as a refit wants them: stacks of experts whole, layer by layer, quantized on the way.

A 30B mixture of experts is a few hundred tensors instead of tens of thousands. Each quantized weight is quantized once
(or taken from the packed cache), digested, and handed over; nothing is kept. Under FSDP2 one parameter at a time is
gathered by all ranks; those without an engine do nothing else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer_qat.cache import CacheMode
from trainer_qat.inventory import Weight
from trainer_qat.payload import Payload, full_tensor, plain_dtype
from trainer_qat.prepare import quantizer_of
from trainer_qat.quantizer import WeightQuantizer, shard_amax
from trainer_qat.ranks import Ranks
from trainer_qat.stillness import Stillness
from trainer_qat.wire import UnitDigests, Wire
from vllm_quads.kernels.tensors import TensorDigests
from vllm_quads.kernels.weights import FiniteCheck, QuantizedStack, quantize_stack, weight_amax
from vllm_quads.nvfp4 import MismatchError, canonical_name, scale_group, unit_fingerprint
from vllm_quads.refit import TensorSpec


@dataclass(frozen=True)
class _Step:
    """One tensor of the model that is sent."""

    name: str
    tensor: Tensor
    weight: Weight | None
    """The quantized weight that it is, if it is one."""
    merges: bool
    """True for a parameter that adapters may add to."""


class PushStream:
    """One push of a payload: `measure`, `combine` and `specs`, then `check`, then the tensors, then `digests`.

    Of a sharded model every rank makes one. The methods that are collectives are nothing else, so that whatever else
    fails leaves a rank able to take part in what follows: `combine`, and `gather_rest`, which does what is left to do
    of the collectives of `tensors`. In `tensors` they alternate with work of this rank alone.
    """

    def __init__(self, payload: Payload, *, packed: bool = True, digest: bool = True) -> None:
        """Nothing is computed yet. packed: NVFP4, else BF16; digest: compute digests while sending."""
        self._payload = payload
        self._packed = packed
        self._amax: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        """Weight -> its amax; of a sharded weight until `combine` that of this rank's part."""
        self._gathered = 0
        """Steps whose collectives this rank has entered."""
        self._ready: dict[str, QuantizedStack] = {}
        self._check: FiniteCheck | None = None
        self._still: Stillness | None = None
        self._digests = UnitDigests()
        self._plain = TensorDigests()
        self._kept: dict[str, WeightQuantizer] = {}
        self.verifies = digest
        """True if digests are computed while sending."""
        self.sharded = payload.sharded
        """True if parameters are sharded over ranks, so that all of them have to gather all of them."""
        self._ranks = Ranks.of(payload.model)
        if not self.sharded:
            for weight in payload.weights():
                quantizer = quantizer_of(weight)
                if quantizer is not None and quantizer.state.cache_mode() is CacheMode.PACKED:
                    self._kept[quantizer.name] = quantizer

    @cached_property
    def _parameters(self) -> list[tuple[str, Tensor, Weight | None]]:
        """Parameters that are sent, in order."""
        return [(name, p, self._payload.weight(name)) for name, p in self._payload.parameters()]

    @cached_property
    def _buffers(self) -> list[tuple[str, Tensor]]:
        return list(self._payload.buffers())

    @cached_property
    def resident(self) -> bool:
        """True if weights that are not quantized are sent as they lie in the model; False if some are gathered, cast,
        merged or rearranged first."""
        plain = ((name, p) for name, p, weight in self._parameters if weight is None)
        return (not self.sharded and not self._payload.merges) and all(
            p.dtype == plain_dtype(p.dtype) and p.is_contiguous() and self._payload.is_kept(name, p)
            for name, p in plain
        )

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
        """Start to compute the amax of every quantized weight, of sharded ones of this rank's part.

        Weights with a packed cache are brought up to date instead, which computes it on the way.
        """
        self._payload.reshard()
        self._still = Stillness(self._payload.model, self._ranks)
        self._check = FiniteCheck()
        for weight in self._payload.weights():
            tensor = weight.tensor
            if not self._take_kept(weight):
                sharded = isinstance(tensor, DTensor)
                self._own[weight.name] = shard_amax(tensor) if sharded else weight_amax(tensor.detach())
        self._make_room()

    def _make_room(self) -> None:
        """Have memory for the largest tensor that will be gathered, or fail here, where all ranks can still be told."""
        sharded = (step.tensor for step in self._steps if isinstance(step.tensor, DTensor))
        largest = max(sharded, key=lambda tensor: tensor.nbytes, default=None)
        if largest is not None:
            torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)

    @torch.no_grad()
    def combine(self) -> None:
        """Of what `measure` has started, the amax of whole weights: one number per matrix travels. A collective."""
        if self.sharded:
            with self._ranks.collective("the largest values of the weights"):
                self._own = {name: full_tensor(own) for name, own in self._own.items()}

    def _share_scales(self, check: FiniteCheck) -> None:
        """The amax that each global scale is taken from; those of the weights are watched for NaN and Inf."""
        groups: dict[str, list[Tensor]] = {}
        weights = [w for w in self._payload.weights() if w.name in self._own]
        for weight in weights:
            own = self._own[weight.name]
            if self.sharded:  # as `weight_amax` rounds
                own = own.to(torch.bfloat16).to(torch.float32)
            check.add(weight.name, own)
            frozen = self._payload.frozen.get(weight.name)
            self._amax[weight.name] = own if frozen is None else frozen.to(own.device)
            if frozen is None and own.dim() == 0:
                groups.setdefault(scale_group(weight.name), []).append(own)
        for weight in weights:
            group = groups.get(scale_group(weight.name), [])
            if len(group) > 1:
                self._amax[weight.name] = torch.stack(group).amax(dim=0)

    def _take_kept(self, weight: Weight) -> bool:
        """Note the packed cache of a weight that shares its scale with no other; False if there is none, or no use."""
        quantizer = self._kept.get(weight.name)
        if quantizer is None or len(quantizer.sources(weight.tensor)) > 1 or not (self._packed or self.verifies):
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
            self.combine()
        assert self._check is not None
        self._share_scales(self._check)
        self._check.check()

    @cached_property
    def _steps(self) -> list[_Step]:
        """What is sent, in order."""
        steps = [_Step(name, p, weight, weight is None) for name, p, weight in self._parameters]
        return steps + [_Step(name, buffer, None, False) for name, buffer in self._buffers]

    @torch.no_grad()
    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Every tensor under its wire name (see `refit.Manifest`). Call `check` first."""
        resident = self.resident
        for step in self._steps:
            full, updates = self._gather(step)
            if step.weight is not None:
                yield from self._weight_tensors(step.weight, full)
                continue
            if step.merges:
                full = self._payload.merged(full, updates)
            for disk, tensor in self._payload.named(step.name, full).items():
                sent = (tensor.to(plain_dtype(tensor.dtype)) if step.merges else tensor).contiguous()
                if self.verifies:
                    self._plain.add(disk, sent, resident=resident)
                yield disk, sent

    @torch.no_grad()
    def gather_rest(self) -> None:
        """The collectives that this rank has not entered yet of those that `tensors` enters. A collective."""
        for step in self._steps[self._gathered :] if self.sharded else ():
            self._gather(step)

    def _gather(self, step: _Step) -> tuple[Tensor, list[Tensor]]:
        """A whole tensor, and what adapters add to it. A collective."""
        self._gathered += 1
        with self._ranks.collective(step.name):
            # An adapter's matrices are gathered as well.
            return full_tensor(step.tensor), self._payload.updates(step.name) if step.merges else []

    def changed(self) -> str | None:
        """A weight that this process has changed since `measure`, of sharded weights in its shards, or None."""
        return None if self._still is None else self._still.changed()

    def check_all_unchanged(self, changed: str | None) -> None:
        """Raise RefitError on all ranks, by name, if one of them has changed a weight (what `changed` says); of sharded
        weights copies are sent, so that changes after the last do no harm. A collective."""
        if self._still is not None:
            self._still.check(changed)

    def check_unchanged(self) -> None:
        """Raise RefitError, by name, if a weight was changed since `measure`. Of sharded weights
        `check_all_unchanged` says so."""
        if not self.sharded:
            self.check_all_unchanged(self.changed())

    def digests(self) -> dict[str, int] | None:
        """Digest of every unit that has been sent, or None if none were asked for; waits for the device once."""
        return self._digests.read() if self.verifies else None

    def plain_digests(self) -> dict[str, int] | None:
        """Digest of every tensor that has been sent and is not quantized, or None if none were asked for; waits for the
        device."""
        return self._plain.read() if self.verifies else None

    def fingerprint(self) -> str | None:
        """Fingerprint of what has been sent, or None if no digests were asked for."""
        digests = self.digests()
        return None if digests is None else unit_fingerprint(digests)

    # -- one quantized weight --------------------------------------------------------------------------------------

    def _wire(self, weight: Weight) -> Wire:
        return self._payload.wire(weight)

    def _weight_tensors(self, weight: Weight, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        wire = self._wire(weight)
        if self._packed or self.verifies:
            stack = self._quantize(weight, full)
            decode = wire.decode_scales(stack)
            if self.verifies:
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
