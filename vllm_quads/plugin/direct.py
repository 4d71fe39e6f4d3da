# SPDX-License-Identifier: Apache-2.0
"""Weights that are not quantized, copied to where vLLM's loaders copy them, all of them at once.

vLLM's loaders take about a tenth of a millisecond of the host a tensor, most of it to find the parameter. So they are
watched once: if all that they do with a tensor is to copy parts of it into parameters, these copies are made directly
from then on. Whatever else they do with it (arithmetic, another dtype, a look at its values), or with the parameter,
leaves the tensor to them for ever, and a tensor of another form or a parameter that was replaced is watched anew.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Named = tuple[str, Tensor]
_Span = tuple[int, int, int]
"""A parameter's id, and where a part of it begins and ends."""


@dataclass(frozen=True)
class _Copy:
    """A part of a tensor that is copied into a part of a parameter."""

    owner: nn.Parameter
    address: int
    """Of the owner."""
    target: Tensor
    """Part of the owner, contiguous; keeps its memory."""
    part: tuple[torch.Size, tuple[int, ...], int] | None
    """Shape, strides and first element of the part of the tensor; None: all of it."""

    def source(self, tensor: Tensor) -> Tensor:
        """The part of a tensor."""
        if self.part is None:
            return tensor
        shape, strides, first = self.part
        return tensor.as_strided(shape, strides, tensor.storage_offset() + first)


@dataclass(frozen=True)
class _Known:
    """What is done with tensors of one name and form."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    copies: tuple[_Copy, ...]
    """Without any, it is left to the loaders."""
    written: tuple[_Span, ...]
    """What the loaders copied it to."""
    shared: bool
    """True if it lay in the memory of another tensor, so that `written` may be the other's; it is watched anew."""

    def fits(self, tensor: Tensor) -> bool:
        """True if it can be done with this tensor."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and tensor.is_contiguous()
        )


class DirectCopies:
    """Copies into the parameters of a model, as far as its loaders have shown how."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        """Id of a parameter -> where it is found: whatever else is found there later is another parameter."""
        self._owners: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                self._places.setdefault(id(parameter), []).append((weakref.ref(module), leaf))
                self._owners[id(parameter)] = parameter
        self._known: dict[str, _Known] = {}
        self._disputed: set[int] = set()
        """Ids of parameters to which loaders have done something else than to copy into them."""

    def copy(self, tensors: Sequence[Named]) -> list[Named]:
        """Copy the tensors of which it is known how; returns the others, for the loaders, in `watching`."""
        left: list[Named] = []
        pairs: dict[torch.dtype | None, list[tuple[Tensor, Tensor]]] = {}
        for name, tensor in tensors:
            known = self._known.get(name)
            if known is not None and not (known.fits(tensor) and all(map(self._is_in_place, known.copies))):
                del self._known[name]
                known = None
            if known is None or not known.copies:
                left.append((name, tensor))
                continue
            for copy in known.copies:
                source = copy.source(tensor)
                pairs.setdefault(tensor.dtype if source.is_contiguous() else None, []).append((copy.target, source))
        for target, source in pairs.pop(None, ()):
            target.copy_(source)
        for alike in pairs.values():  # which a GPU does with a few kernels
            torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
        return left

    @contextlib.contextmanager
    def watching(self, tensors: Sequence[Named]) -> Iterator[None]:
        """Learn from what loaders do with these tensors inside."""
        new = [(name, t) for name, t in tensors if self._is_new(name) and t.is_contiguous() and t.numel()]
        if not new:
            yield
            return
        watch = _Watch(new, self._owners.values())
        with watch:
            yield
        for name, tensor in new:
            shared = name in watch.shared
            usable = not watch.is_blind and name not in watch.spoiled and not shared
            copies = tuple(watch.copies(name, tensor)) if usable else ()
            if not all(map(self._is_in_place, copies)):
                copies = ()
            written = tuple(watch.spans(name))
            self._known[name] = _Known(tensor.shape, tensor.dtype, tensor.device, copies, written, shared)
        self._disputed |= watch.changed()
        self._leave_disputed({owner for name, _ in new for owner, _, _ in self._known[name].written})

    def _is_new(self, name: str) -> bool:
        return name not in self._known or self._known[name].shared

    def _leave_disputed(self, owners: set[int]) -> None:
        """Where tensors overwrite each other, or are not all that is written, their order decides, which the loaders
        know. owners: in which that may be so now."""
        spans: list[tuple[_Span, str]] = []
        left: set[str] = set()
        for name, known in self._known.items():
            for span in known.written:
                if span[0] in owners:
                    spans.append((span, name))
                if span[0] in self._disputed:
                    left.add(name)
        spans.sort()
        furthest: tuple[int, int, str] | None = None  # of the spans so far: parameter, end, tensor
        for (owner, begin, end), name in spans:
            if furthest is not None and furthest[0] == owner and furthest[1] > begin:
                left |= {furthest[2], name}
            if furthest is None or furthest[0] != owner or furthest[1] < end:
                furthest = (owner, end, name)
        for name in left:
            self._known[name] = replace(self._known[name], copies=())

    def _is_in_place(self, copy: _Copy) -> bool:
        owner = copy.owner
        return owner.data_ptr() == copy.address and all(
            (module := place()) is not None and module._parameters.get(leaf) is owner
            for place, leaf in self._places[id(owner)]
        )


class _Watch(TorchDispatchMode):
    """Sees what is done with tensors and with parameters."""

    def __init__(self, tensors: Sequence[Named], owners: Any) -> None:
        super().__init__()
        self.is_blind = False
        """True once something was done that it cannot follow."""
        self.spoiled: set[str] = set()
        """Tensors with which something else was done than to copy them."""
        self._sources: dict[int, list[tuple[int, int, str]]] = {}
        for name, t in tensors:
            self._sources.setdefault(_storage(t), []).append((t.data_ptr(), t.data_ptr() + t.nbytes, name))
        self.shared: set[str] = set()
        """Tensors that have memory in common: what is done there may be done with any of them."""
        for parts in self._sources.values():
            parts.sort()
            furthest = parts[0]
            for part in parts[1:]:
                if part[0] < furthest[1]:
                    self.shared |= {part[2], furthest[2]}
                furthest = max(furthest, part, key=lambda p: p[1])
        self._owners: dict[int, nn.Parameter | None] = {}
        """Address of a storage -> the parameter that it belongs to; None if there are several."""
        self._ids: dict[int, list[int]] = {}
        self._addresses: dict[int, int] = {}
        for owner in owners:
            self._ids.setdefault(_storage(owner), []).append(id(owner))
            self._owners[_storage(owner)] = None if _storage(owner) in self._owners else owner
            self._addresses[id(owner)] = owner.data_ptr()
        self._written: dict[int, list[tuple[set[str], nn.Parameter, Tensor, Tensor]]] = {}
        """Address of a storage -> tensors, parameter, target and source of each copy into it."""
        self._changed: set[int] = set()
        """Addresses of storages of parameters with which something else was done than to copy into them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        try:
            self._look(func, args, kwargs, out)
        except Exception:  # tensors without memory of their own
            self.is_blind = True
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is torch.ops.aten.copy_.default and self._is_copy(args[0], args[1]):
            return
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        may_view = outputs and not func._schema.is_mutable
        for x in tree_leaves((args, kwargs)):
            if not isinstance(x, Tensor) or not x.numel():
                continue
            storage = _storage(x)
            if may_view and all(not o.numel() or _storage(o) == storage for o in outputs):
                continue
            if storage in self._owners:
                self._changed.add(storage)
            self.spoiled |= self._names(x) or {name for _, _, name in self._sources.get(storage, ())}

    def _is_copy(self, target: Tensor, source: Tensor) -> bool:
        """Remember a copy of a part of a tensor into a part of a parameter; False if it is something else."""
        names, storage = self._names(source), _storage(target)
        owner = self._owners.get(storage)
        plain = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
        if not names or owner is None or not plain or not target.is_contiguous():
            return False
        self._written.setdefault(storage, []).append((names, owner, target.detach(), source))
        return True

    def _names(self, x: Tensor) -> set[str]:
        """The tensors that this may be a part of."""
        address = x.data_ptr()
        return {name for begin, end, name in self._sources.get(_storage(x), ()) if begin <= address < end}

    def spans(self, name: str) -> Iterator[_Span]:
        """Where a tensor was copied to."""
        for written in self._written.values():
            for own, owner, target, _ in written:
                if name in own:
                    yield id(owner), target.data_ptr(), target.data_ptr() + target.nbytes

    def changed(self) -> set[int]:
        """Ids of the parameters with which something else was done than to copy into them."""
        return {owner for storage in self._changed for owner in self._ids[storage]}

    def copies(self, name: str, tensor: Tensor) -> Iterator[_Copy]:
        """What was copied of a tensor; nothing if that may not be all that was done."""
        found = [w[1:] for written in self._written.values() for w in written if name in w[0]]
        for _, target, source in found:
            if not torch.equal(_bytes(target), _bytes(source.contiguous())):
                return
        for owner, target, source in found:
            whole = source.shape == tensor.shape and source.is_contiguous()
            first = int(source.storage_offset() - tensor.storage_offset())
            part = None if whole else (source.shape, source.stride(), first)
            yield _Copy(owner, self._addresses[id(owner)], target, part)


def _storage(t: Tensor) -> int:
    """Address of the memory that a tensor is a part of."""
    return t.untyped_storage().data_ptr()


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


__all__ = ["DirectCopies"]
