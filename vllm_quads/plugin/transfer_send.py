# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of CUDA IPC and of vLLM's NCCL transport, as data planes of `vllm_quads.refit.transport`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin import compat
from vllm_quads.plugin.transfer_receive import encode_handle
from vllm_quads.refit.transport import WORKER, Control, Messenger

_BUCKET = 512 * 2**20
_SMALL = 2**20
"""Tensors below this many bytes share one buffer and one IPC handle; larger ones are read where they are."""
_ONE_CHUNK = 1 << 62
"""Buffer size that lets vLLM's packed broadcast send a whole bucket at once."""


class IpcPlane:
    """Trainer and engine on the same GPU(s): the workers read the trainer's memory.

    A worker on a GPU that is not the tensors' own gets a copy made on its GPU, which this process has to see.
    """

    name = "ipc"

    def __init__(self, bucket_bytes: int = _BUCKET) -> None:
        self.bucket_bytes = bucket_bytes
        self._devices: dict[str, torch.device] = {}

    def connect(self, control: Control, instance: str) -> None:
        """Find the workers' GPUs among this process' own. Raises RefitError for one that it does not see, or that
        several workers share."""
        mine = {_uuid(i): torch.device("cuda", i) for i in range(torch.cuda.device_count())}
        wanted = [str(status.get("gpu")) for status in control.rpc(WORKER, "status")]
        missing = [gpu for gpu in wanted if gpu not in mine]
        if missing:
            raise RefitError(
                f"CUDA IPC: a worker runs on GPU {missing[0]}, which the trainer does not see (only {sorted(mine)}); "
                f"use the NCCL data plane for engines on other GPUs"
            )
        twice = next((gpu for gpu in wanted if wanted.count(gpu) > 1), None)
        if twice is not None:  # memory that is exported once may be opened once
            raise RefitError(f"CUDA IPC: several workers run on GPU {twice}; use the NCCL data plane")
        self._devices = {gpu: mine[gpu] for gpu in wanted}

    def send(self, control: Messenger, tensors: list[tuple[str, Tensor]]) -> None:
        """Send handles, and wait until every worker has read the memory behind them."""
        _require_gpu("CUDA IPC", tensors)
        large = [(n, t.detach().contiguous()) for n, t in tensors if t.nbytes >= _SMALL]
        small = [(n, t.detach().contiguous()) for n, t in tensors if t.nbytes < _SMALL]
        if large:
            copies = [{gpu: t.to(device) for gpu, device in self._devices.items()} for _, t in large]
            handles = [{gpu: encode_handle(t) for gpu, t in each.items()} for each in copies]
            self._synchronize()
            control.update({"op": "load", "plane": "ipc", "handles": handles, **_metadata(large)})
            del copies
        if small:
            small = _aligned(small)
            buffer = torch.cat([t.reshape(-1).view(torch.uint8) for _, t in small])
            buffers = {gpu: buffer.to(device) for gpu, device in self._devices.items()}
            handle = {gpu: encode_handle(t) for gpu, t in buffers.items()}
            self._synchronize()
            sizes = [t.nbytes for _, t in small]
            message = {"op": "load", "plane": "ipc", "handles": handle, "tensor_sizes": sizes}
            control.update(message | _metadata(small))
            del buffer, buffers
        torch.cuda.ipc_collect()

    def _synchronize(self) -> None:
        for device in self._devices.values():
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Give exported memory back."""
        torch.cuda.ipc_collect()


class NcclPlane:
    """Trainer and engine on different GPUs, of one machine or of several: one broadcast per bucket to all workers."""

    name = "nccl"

    def __init__(
        self,
        world_size: Callable[[], int],
        *,
        address: str | None = None,
        port: int | None = None,
        bucket_bytes: int = _BUCKET,
    ) -> None:
        """world_size: number of workers, asked at the first push; address, port: of this process, where workers meet it
        (None: this machine's address and a free port)."""
        self.bucket_bytes = bucket_bytes
        self._world_size, self._address, self._port = world_size, address, port
        self._instance: str | None = None
        self._group: Any = None

    def connect(self, control: Control, instance: str) -> None:
        """Meet the workers, unless this engine has been met before. Raises RefitError if they do not come."""
        if self._instance == instance:
            return
        self.close()
        info = {
            "master_address": self._address or compat.own_address(),
            "master_port": self._port or compat.free_port(),
            "rank_offset": 1,
            "world_size": 1 + self._world_size(),
            "packed": True,
            "packed_buffer_size_bytes": _ONE_CHUNK,
        }
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def join() -> Any:
            with nullcontext() if device is None else torch.cuda.device(device):
                return compat.join_as_trainer(info)

        pool = ThreadPoolExecutor(2, thread_name_prefix="quads-nccl")
        try:
            # Both wait for each other, unless one of them fails.
            workers = pool.submit(control.init, {"plane": "nccl", "info": info})
            trainer = pool.submit(join)
            wait((workers, trainer), return_when=FIRST_COMPLETED)
            if workers.done():
                workers.result()
                self._require_joined(control)
            self._group = trainer.result()
            workers.result()
        finally:
            pool.shutdown(wait=False)
        self._require_joined(control)
        self._instance = instance

    @staticmethod
    def _require_joined(control: Control) -> None:
        for rank, status in enumerate(control.rpc(WORKER, "status")):
            if status.get("plane_error"):
                raise RefitError(f"NCCL: worker {rank} could not join: {status['plane_error']}")

    def send(self, control: Messenger, tensors: list[tuple[str, Tensor]]) -> None:
        """Broadcast one bucket while the workers receive it."""
        _require_gpu("NCCL", tensors)
        ordered = _aligned([(n, t.detach().contiguous()) for n, t in tensors])
        message = {
            "op": "load", "plane": "nccl", "packed": True, "packed_buffer_size_bytes": _ONE_CHUNK,
            **_metadata(ordered),
        }  # fmt: skip
        pool = ThreadPoolExecutor(1, thread_name_prefix="quads-nccl")
        try:
            received = pool.submit(control.update, message)
            if received.done():
                received.result()  # refused before NCCL was entered: nobody would answer the broadcast
            device = ordered[0][1].device  # a thread begins with the first GPU as its current one
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                if device.type == "cuda":  # vLLM packs on streams of its own, which do not wait for what was copied
                    torch.cuda.current_stream().synchronize()
                compat.broadcast_as_trainer(iter(ordered), self._group, _ONE_CHUNK)
            received.result()
            if device.type == "cuda":  # nor does what the tensors' memory is used for next wait for these streams
                torch.cuda.synchronize(device)
        finally:
            pool.shutdown(wait=False)  # after a failed broadcast the workers stay in NCCL: do not wait for them

    def close(self) -> None:
        """Leave the group."""
        self._instance = None
        group, self._group = self._group, None
        destroy = getattr(group, "destroy", None)
        if destroy is not None:
            destroy()


def _require_gpu(plane: str, tensors: list[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if not tensor.is_cuda:
            raise RefitError(f"{name}: is on {tensor.device}, {plane} needs the trainer's weights on a GPU")


def _aligned(tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Widest dtype first: vLLM packs without padding and views each part, which has to be aligned for its dtype."""
    return sorted(tensors, key=lambda item: -item[1].dtype.itemsize)


def _metadata(tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "names": [n for n, _ in tensors],
        "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
        "shapes": [list(t.shape) or [1] for _, t in tensors],
        "scalars": [n for n, t in tensors if t.dim() == 0],
    }


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


__all__ = ["IpcPlane", "NcclPlane"]
