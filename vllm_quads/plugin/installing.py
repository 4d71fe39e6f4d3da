# SPDX-License-Identifier: Apache-2.0
"""Tensors of a refit into the model, unit by unit as they become complete. On a GPU it only enqueues work.

Expect hundreds of units in tens of milliseconds: nothing here may wait for the device, and what can be known in advance
has been worked out before (`inventory.Plan`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin.arrivals import Arrivals
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.direct import DirectCopies
from vllm_quads.plugin.inventory import Inventory, Plan, TensorName
from vllm_quads.plugin.open_refit import OpenRefit
from vllm_quads.plugin.refit_checks import check_promised, require_undisturbed
from vllm_quads.plugin.runtime import settle_together
from vllm_quads.refit import Lasting

_FLUSH_BYTES = 256 * 1024**2
"""Weights that are not quantized are written whenever this much memory is held for them."""


class Installer:
    """Writes what arrives. Methods raise RefitError for what the manifest does not promise or what is damaged."""

    def __init__(
        self, model: Callable[[], Any], config: QuadsConfig, inventory: Inventory, device: torch.device
    ) -> None:
        self._model = model
        self._config = config
        self._inventory = inventory
        self._device = device
        self._disk_names: dict[str, str] = {}
        self._direct: DirectCopies | None = None
        self._dtypes: dict[tuple[str, ...], frozenset[torch.dtype]] = {}
        self._planned: Plan | None = None
        """What they are of."""

    def receive(self, refit: OpenRefit, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors, and install every unit that they complete.

        What `Lasting` or a sequence gives is read where it lies, and copied at the end if a unit still waits for more.
        """
        lasting = isinstance(tensors, Lasting)
        held = lasting or isinstance(tensors, Sequence)
        specs, slots, timer = refit.manifest.tensors, refit.plan.slots, refit.timer
        free = tensors.resident if isinstance(tensors, Lasting) else held
        plain: list[tuple[str, Tensor]] = []
        borrowed: dict[str, Arrivals] = {}
        waiting = 0
        for name, tensor in _timed(refit, tensors):
            check_promised(specs.get(name), refit.outstanding, name, tensor)
            refit.outstanding.discard(name)
            refit.bytes += tensor.nbytes
            refit.last = name
            if tensor.requires_grad:
                tensor = tensor.detach()
            in_place = held and tensor.device == self._device
            slot = slots.get(name)
            if slot is not None:
                unit = slot.unit.name
                arrivals = refit.arrivals[unit]
                if in_place:
                    arrivals.accept(slot, tensor)
                else:
                    with timer.phase("transfer"):
                        arrivals.accept(slot, tensor)
                        if arrivals.waiting and not held:
                            arrivals.own()
                if arrivals.waiting == 0:
                    borrowed.pop(unit, None)
                    with refit.writing():
                        self._install(refit, refit.arrivals.pop(unit))
                elif not lasting:
                    borrowed[unit] = arrivals
            elif name in refit.plan.plain:
                if not in_place:
                    with timer.phase("transfer"):
                        tensor = tensor.to(self._device, copy=True)
                plain.append((name, tensor))
                waiting += 0 if in_place and free else tensor.nbytes
                if waiting >= _FLUSH_BYTES:
                    with refit.writing():
                        self._load_plain(refit, plain)
                    plain, waiting = [], 0
        with refit.writing():
            self._load_plain(refit, plain)
        for arrivals in borrowed.values():
            with timer.phase("transfer"):
                arrivals.own()
        with refit.writing():
            self._settle(refit)
        timer.rest()

    # -- quantized -------------------------------------------------------------------------------------------------

    def _install(self, refit: OpenRefit, arrivals: Arrivals) -> None:
        """Write one unit, whose tensors have all arrived."""
        unit, loader, timer, flags = arrivals.unit, arrivals.unit.runtime.loader, refit.timer, refit.flags
        receipts, holder = refit.receipts[unit.name], unit.holder
        amax = None
        if arrivals.is_float:
            with timer.phase("validate"):
                amax = unit.shared_amax(arrivals.fields)
                flags.add("amax", amax[:, 0], f"{unit.name}: holds NaN or Inf; the trainer has diverged")
                frozen = loader.frozen_amax(unit.matrices)
                amax = amax if frozen is None else frozen.to(amax.device).reshape(amax.shape)
        elif (first := self._looks_first(refit)) or holder is None:  # a holder looks while it writes
            with timer.phase("validate"):
                unit.watch(arrivals.fields, flags, at_once=first)
        if arrivals.has_input_scales:
            unit.watch_input_scales(arrivals.fields, arrivals.input_scales, flags)
        self._before_writing(refit)
        if unit.key not in refit.loaders:
            refit.loaders[unit.key] = loader.remember()
        if refit.undo is not None:
            with timer.phase("undo"):
                for i, storage in enumerate(unit.storages()):
                    refit.undo.save(f"{unit.name}.{i}", storage)
        if amax is None:
            refit.kinds.add("packed")
            with timer.phase("install"):
                unit.write_packed(arrivals.fields, receipts, holder)
        else:
            refit.kinds.add("bf16")
            with timer.phase("quantize"):
                unit.write_quantized(arrivals.fields, amax, receipts, holder)
        if arrivals.has_input_scales:
            unit.write_input_scales(arrivals.fields, arrivals.input_scales)
        refit.units_left[unit.key] -= 1
        if refit.units_left[unit.key] == 0:
            loader.replaced()
            refit.versions[unit.key] = loader.version
            refit.unsettled.append(unit.runtime)

    def _settle(self, refit: OpenRefit) -> None:
        """What is derived from layers that are complete. After the installs, which keep the device busy meanwhile."""
        if refit.unsettled:
            with refit.timer.phase("derive"):
                settle_together(refit.unsettled)
            refit.unsettled.clear()

    # -- not quantized ---------------------------------------------------------------------------------------------

    def _load_plain(self, refit: OpenRefit, tensors: list[tuple[str, Tensor]]) -> None:
        """Write what is not quantized: as vLLM's own loaders do, or by them."""
        model = self._model()
        if not tensors or model is None:
            return
        with refit.timer.phase("validate"):
            self._watch_plain(refit, tensors)
        if refit.plain is not None:  # whole, before a loader takes this rank's part
            with refit.timer.phase("verify"):
                refit.plain.add_all(tensors)
        self._before_writing(refit)
        if refit.undo is not None:
            with refit.timer.phase("undo"):
                for name, _ in tensors:
                    for key in refit.plan.plain[name]:
                        parameter = self._inventory.owners[key]
                        refit.undo.save(f"parameter {id(parameter)}", parameter.data)
        if self._direct is None:
            self._direct = DirectCopies(model)
        with refit.timer.phase("install"):
            left = self._direct.copy(tensors)
            if left:
                with self._device, self._direct.watching(left):
                    model.load_weights((self._disk_name(name), tensor) for name, tensor in left)

    def _watch_plain(self, refit: OpenRefit, tensors: list[tuple[str, Tensor]]) -> None:
        """Look for damage in what is not quantized: a kernel or two for all tensors of one dtype."""
        groups: dict[tuple[torch.dtype, torch.dtype | None], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if not tensor.numel():
                continue
            other = self._dtypes_of(refit, name) - {tensor.dtype}
            for dtype in other or (None,):
                groups.setdefault((tensor.dtype, dtype), []).append((name, tensor))
        for (_, dtype), entries in groups.items():
            names = [name for name, _ in entries]
            amax = torch.stack(torch._foreach_norm([t for _, t in entries], torch.inf))
            what = "NaN or Inf" if dtype is None else f"NaN or Inf, or more than {dtype} can hold"

            def message(i: int, names: list[str] = names, what: str = what) -> str:
                return f"{names[i]}: holds {what}; the trainer has diverged"

            refit.flags.add("amax", amax if dtype is None else amax.to(dtype), message)

    def _dtypes_of(self, refit: OpenRefit, name: str) -> frozenset[torch.dtype]:
        """Dtypes of the parameters that a tensor changes."""
        keys = refit.plan.plain[name]
        if self._planned is not refit.plan:  # parameters may be others
            self._dtypes, self._planned = {}, refit.plan
        if keys not in self._dtypes:
            self._dtypes[keys] = frozenset(self._inventory.owners[key].dtype for key in keys)
        return self._dtypes[keys]

    def _disk_name(self, name: str) -> str:
        """How vLLM's loaders call a tensor."""
        if name not in self._disk_names:
            self._disk_names[name] = self._config.disk_name(str(TensorName.parse(name)))
        return self._disk_names[name]

    def _looks_first(self, refit: OpenRefit) -> bool:
        """What is damaged must not be the first thing that is written. On a CPU, looking costs nothing: always."""
        return not refit.touched or self._device.type == "cpu"

    def _before_writing(self, refit: OpenRefit) -> None:
        if self._looks_first(refit):
            refit.flags.check()
        if not refit.touched:
            require_undisturbed(refit, self._config)
            refit.touched = True
            self._config.refusal = (
                f"a refit to policy version {refit.manifest.policy_version} is under way; commit or abort it first"
            )


def _timed(refit: OpenRefit, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors; the time that the sender takes counts as transfer."""
    iterator = iter(tensors)
    passive = isinstance(tensors, Sequence) or (isinstance(tensors, Lasting) and tensors.passive)
    while True:
        if passive:
            item = next(iterator, None)
        else:
            refit.timer.rest()
            start = time.perf_counter()
            item = next(iterator, None)
            refit.timer.add("transfer", time.perf_counter() - start)
        if refit.ended:  # by the sender, or by another thread
            raise RefitError(refit.ended)
        if item is None:
            return
        yield item


__all__ = ["Installer"]
