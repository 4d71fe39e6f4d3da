# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf in weights on a GPU: noticed without making the host wait for it.

On a CPU a weight that is not finite is refused where it is quantized. On a GPU the amax of every quantized weight is
collected; when a weight comes round again, those of the pass that ended are copied to the host in the background, and
an error is raised by whichever quantization first finds that copy done, usually within the next forward pass. Until
then such a weight quantizes to NaN, so no finite loss comes out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4.errors import FormatError


@dataclass
class _Pass:
    """The amax values of one pass, on their way to the host."""

    names: list[str]
    sizes: list[int]
    finite: Tensor
    """bool on the host, one per matrix; valid once `done` has happened."""
    done: torch.cuda.Event


class FiniteWatch:
    """Collects amax values on GPUs and raises for those that are not finite, some time later."""

    def __init__(self) -> None:
        self._amax: dict[tuple[str, torch.device], Tensor] = {}
        self._passes: list[_Pass] = []

    def add(self, name: str, amax: Tensor) -> None:
        """Watch an amax float32 [...]. Raises FormatError if an earlier one is known to be NaN or Inf."""
        if torch.cuda.is_current_stream_capturing():
            return  # a replay runs without this code
        self._raise_known()
        key = (name, amax.device)
        if key in self._amax:
            self._send()
        self._amax[key] = amax

    def wait(self) -> None:
        """Look at everything collected so far. Raises FormatError naming the first weight that is not finite."""
        self._send()
        for p in self._passes:
            p.done.synchronize()
        self._raise_known()

    def _send(self) -> None:
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for (name, device), amax in self._amax.items():
            by_device.setdefault(device, []).append((name, amax))
        self._amax.clear()
        for device, entries in by_device.items():
            with torch.cuda.device(device):
                finite = torch.isfinite(torch.cat([a.reshape(-1) for _, a in entries]))
                host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
                host.copy_(finite, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            self._passes.append(_Pass([n for n, _ in entries], [a.numel() for _, a in entries], host, done))

    def _raise_known(self) -> None:
        while self._passes and self._passes[0].done.query():
            p = self._passes.pop(0)
            for name, finite in zip(p.names, p.finite.split(p.sizes), strict=True):
                bad = (~finite).nonzero().flatten()
                if len(bad):
                    self._passes.clear()
                    self._amax.clear()
                    matrix = f" (matrix {int(bad[0])} of the stack)" if len(finite) > 1 else ""
                    raise FormatError(
                        f"{name}: holds NaN or Inf{matrix}, which NVFP4 cannot represent; "
                        f"the model has diverged or the file is damaged"
                    )


WATCH = FiniteWatch()
"""The watch of this process."""


def check_finite() -> None:
    """Wait for the GPU and raise FormatError if a weight that was quantized so far holds NaN or Inf.

    Only GPUs need it: on a CPU the forward pass raises by itself.
    """
    WATCH.wait()
