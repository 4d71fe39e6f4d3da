# SPDX-License-Identifier: Apache-2.0
"""Digests of the units of one rank: one kernel launch for each stack of matrices, one sum for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vllm_quads.kernels.weights import QuantizedStack, digest_stack
from vllm_quads.nvfp4 import name_weights
from vllm_quads.plugin import compat
from vllm_quads.plugin.units import Section, Unit

MODULO = 1 << 64


class DigestTable:
    """Where the digest of every matrix of some units goes, and how they add up to those of the units."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self.device = device
        self._units = list(units)
        self._slots: dict[str, list[slice]] = {}
        weights, index, end = [], [], 0
        for number, unit in enumerate(self._units):
            for section in unit.sections:
                count = len(section.matrices)
                self._slots.setdefault(unit.name, []).append(slice(end, end + count))
                # Another rank has the same shard of a section that is not counted.
                own = name_weights(m.name for m in section.matrices)
                weights.append(own if section.first.counted else torch.zeros_like(own))
                index += [number] * count
                end += count
        self._weights = torch.cat(weights).to(device) if weights else torch.zeros(0, dtype=torch.int64, device=device)
        self._index = torch.tensor(index, dtype=torch.int64, device=device)

    def empty(self) -> Tensor:
        """Room for the digests of all matrices, int64."""
        return torch.zeros_like(self._weights)

    def write(self, unit: Unit, out: Tensor, shards: Sequence[QuantizedStack] | None = None) -> None:
        """Digest what serves of a unit, or the shards that its `write_*` returned. Waits for nothing."""
        if shards is None:
            shards = unit.stored()
        for section, shard, slot in zip(unit.sections, shards, self._slots[unit.name], strict=True):
            if section.first.counted:
                _digest(section, shard, out[slot])

    def read(self, digests: Tensor) -> dict[str, int]:
        """This rank's part of every unit's digest, 0 .. 2^64; waits for the device once."""
        totals = torch.zeros(len(self._units), dtype=torch.int64, device=self.device)
        totals.index_add_(0, self._index, digests * self._weights)
        return {u.name: v % MODULO for u, v in zip(self._units, totals.tolist(), strict=True)}

    def of_what_serves(self, units: Iterable[Unit]) -> dict[str, int]:
        """Digests of some of the units, from the bytes that serve now."""
        chosen = list(units)
        out = self.empty()
        for unit in chosen:
            self.write(unit, out)
        everything = self.read(out)
        return {unit.name: everything[unit.name] for unit in chosen}


def _digest(section: Section, shard: QuantizedStack, out: Tensor) -> None:
    m = section.first
    digest_stack(
        shard,
        row_offset=m.local_n[0],
        k_offset=m.local_k[0],
        count_global=m.local_n[0] == 0 and m.local_k[0] == 0,
        out=out.view(section.lead),
    )


def added(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of units over all ranks."""
    total: dict[str, int] = {}
    for own in ranks:
        for name, digest in own.items():
            total[name] = (total.get(name, 0) + digest) % MODULO
    return total


def over_ranks(own: Mapping[str, int]) -> dict[str, int]:
    """This rank's digests added to those of the other tensor-parallel ranks, which all have to ask."""
    return added(compat.gather(dict(own)))
