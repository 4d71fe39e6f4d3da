# SPDX-License-Identifier: Apache-2.0
"""Tensors of one unit on their way in: collected until the unit is complete, copied only if they have to wait."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_quads.plugin.inventory import Slot
from vllm_quads.plugin.units import FIELD_DTYPES, PACKED_FIELDS, Unit


class Arrivals:
    """What has arrived of one unit. Stacks are kept as they are until `own` is called; matrices are copied into one."""

    def __init__(self, unit: Unit, waiting: int, device: torch.device) -> None:
        self.unit = unit
        self.waiting = waiting
        """Tensors of the manifest that have not arrived yet."""
        self.fields: list[dict[str, Tensor]] = [{} for _ in unit.sections]
        """Whole fields of each section: [E, P, ...], but for packed ones that came as a stack: as they came."""
        self.input_scales: list[set[str]] = [set() for _ in unit.sections]
        """Names of the matrices that an activation scale was sent for."""
        self.has_input_scales = False
        self._device = device
        self._borrowed: list[tuple[int, str]] = []

    @property
    def is_float(self) -> bool:
        """True if the unit has to be quantized here."""
        return "float" in self.fields[0]

    def accept(self, slot: Slot, tensor: Tensor) -> None:
        """Take a tensor whose shape and dtype have been checked."""
        self.waiting -= 1
        section = self.unit.sections[slot.section]
        fields = self.fields[slot.section]
        if slot.encode:
            tensor = 1.0 / tensor
        if slot.index is None or (section.lead == (1, 1) and slot.field != "input"):
            local = self._local(tensor, slot)
            if local.device == self._device:
                self._borrowed.append((slot.section, slot.field))
            else:
                local = local.to(self._device, non_blocking=local.is_cuda)
            fields[slot.field] = (
                local if slot.field in PACKED_FIELDS else local.reshape(section.full_shapes[slot.field])
            )
            return
        shape = section.full_shapes[slot.field]
        if slot.field not in fields:
            fields[slot.field] = torch.empty(shape, dtype=FIELD_DTYPES[slot.field], device=self._device)
        expert, part = slot.index
        target = fields[slot.field][expert, part]
        if slot.field == "scales":
            target, tensor = target.view(torch.uint8), tensor.view(torch.uint8)
        target.copy_(tensor.reshape(target.shape))
        if slot.field == "input":
            self.has_input_scales = True
            self.input_scales[slot.section].add(section.matrices[expert * section.lead[1] + part].name)

    def own(self) -> None:
        """Copy what still lies in the sender's memory, which may be reused when this returns."""
        for section, field in self._borrowed:
            self.fields[section][field] = self.fields[section][field].clone()
        self._borrowed.clear()

    def _local(self, tensor: Tensor, slot: Slot) -> Tensor:
        """The experts of this rank, of a stack."""
        experts = self.unit.experts if slot.index is None else None
        if experts is None or tensor.shape[0] == len(experts):
            return tensor
        first = experts[0]
        if experts == tuple(range(first, first + len(experts))):
            return tensor[first : first + len(experts)]
        return tensor[torch.tensor(experts, device=tensor.device)]
