# SPDX-License-Identifier: Apache-2.0
"""Digests of the units of one rank: written unit by unit, added up in one sum for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vllm_quads.nvfp4 import name_weights
from vllm_quads.plugin import compat
from vllm_quads.plugin.backends import Receipt
from vllm_quads.plugin.units import Unit

MODULO = 1 << 64


class DigestTable:
    """Where the digest of every matrix of some units goes, and how they add up to those of the units."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self.device = device
        self._units = list(units)
        self._sizes = [len(section.matrices) for unit in units for section in unit.sections]
        weights, index = [], []
        for number, unit in enumerate(self._units):
            for section in unit.sections:
                # Another rank has the same shard of a section that is not counted.
                own = name_weights(m.name for m in section.matrices)
                weights.append(own if section.first.counted else torch.zeros_like(own))
                index += [number] * len(section.matrices)
        self._weights = torch.cat(weights).to(device) if weights else torch.zeros(0, dtype=torch.int64, device=device)
        self._index = torch.tensor(index, dtype=torch.int64, device=device)

    def empty(self) -> Tensor:
        """Room for the digests of all matrices, int64, zero."""
        return torch.zeros_like(self._weights)

    def by_unit(self, digests: Tensor) -> dict[str, list[Tensor]]:
        """Unit name -> the part of each of its sections, views."""
        parts = iter(digests.split(self._sizes))
        return {unit.name: [next(parts) for _ in unit.sections] for unit in self._units}

    def receipts(self, digests: Tensor, status: Tensor) -> dict[str, list[Receipt]]:
        """Unit name -> what writing it gets; status: int32 [units], zero."""
        parts = self.by_unit(digests)
        return {
            unit.name: unit.receipts(parts[unit.name], word)
            for unit, word in zip(self._units, status.split(1), strict=True)
        }

    def read(self, digests: Tensor) -> dict[str, int]:
        """This rank's part of every unit's digest, 0 .. 2^64; waits for the device once."""
        totals = torch.zeros(len(self._units), dtype=torch.int64, device=self.device)
        totals.index_add_(0, self._index, digests * self._weights)
        return {u.name: v % MODULO for u, v in zip(self._units, totals.tolist(), strict=True)}

    def of_what_serves(self, units: Iterable[Unit]) -> dict[str, int]:
        """Digests of some of the units, from the bytes that serve now."""
        chosen = list(units)
        digests = self.empty()
        parts = self.by_unit(digests)
        for unit in chosen:
            for section, shard, out in zip(unit.sections, unit.stored(), parts[unit.name], strict=True):
                section.digest(shard, out)
        everything = self.read(digests)
        return {unit.name: everything[unit.name] for unit in chosen}


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
