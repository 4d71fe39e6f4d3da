# SPDX-License-Identifier: Apache-2.0
"""How tensors reach a worker: vLLM's NCCL engine, whose "model" is a refit session; CUDA IPC handles; files; bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin import compat

TORCH_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool,
}  # fmt: skip
"""Safetensors dtype names."""


class Sink(Protocol):
    """What vLLM's receiving engines take for the model."""

    def load_weights(self, weights: Any) -> Any: ...


class Receivers:
    """The data planes of one worker; vLLM's engine is made when first used."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, sink: Sink) -> None:
        self._arguments = (config, vllm_config, device, self)
        self._device = device
        self._sink = sink
        self._scalars: set[str] = set()
        self._engine: Any = None

    def init(self, plane: str, info: Mapping[str, Any]) -> None:
        """Prepare a plane. NCCL: `master_address`, `master_port`, `rank_offset`, `world_size`; blocks until the trainer
        has joined. A second trainer replaces the first."""
        if plane not in ("inline", "disk", "ipc", "nccl"):
            raise RefitError(f"plane: is {plane!r}, expected 'inline', 'disk', 'ipc' or 'nccl'")
        if plane == "nccl":
            self.close()
            self._nccl().init_transfer_engine(compat.init_info(self._nccl(), info))

    def receive(self, plane: str, arguments: dict[str, Any]) -> None:
        """Hand the tensors of one message to the sink."""
        if plane == "inline":
            data = arguments["data"]
            self._sink.load_weights(list(load(base64.b64decode(data) if isinstance(data, str) else data).items()))
        elif plane == "disk":
            self._sink.load_weights(list(_read(Path(arguments["file"])).items()))
        elif plane == "ipc":
            self._scalars = set(arguments.get("scalars", ()))
            try:
                self.load_weights(_opened(arguments, self._device))
            finally:
                self._wait()  # the trainer takes the answer for leave to use this memory for something else
        elif plane == "nccl":
            self._scalars = set(arguments.get("scalars", ()))
            self._nccl().receive_weights(compat.update_info(self._nccl(), arguments))
        else:
            raise RefitError(f"plane: is {plane!r}, expected 'inline', 'disk', 'ipc' or 'nccl'")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """What vLLM's receiving engine calls. Scalars travel as vectors, because vLLM 0.26 cannot unpack them."""
        self._sink.load_weights([(n, t.reshape(()) if n in self._scalars else t) for n, t in weights])

    def _nccl(self) -> Any:
        if self._engine is None:
            self._engine = compat.nccl_engine_class()(*self._arguments)
        return self._engine

    def close(self) -> None:
        """Leave the communicator."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as e:
        raise RefitError(
            f"{file}: cannot be read by the engine ({e}); the trainer's `directory` has to be one that both sides see"
        ) from e


def _opened(arguments: Mapping[str, Any], device: torch.device) -> list[tuple[str, Tensor]]:
    """Views of the trainer's memory, or copies of what lay in one shared buffer.

    With handles in JSON instead of vLLM's pickled ones, which need VLLM_ALLOW_INSECURE_SERIALIZATION=1; and without
    vLLM's IPC engine, which cannot be imported without Ray in 0.26.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

    handles, names = arguments["handles"], arguments["names"]
    if isinstance(handles, Mapping):
        return packed_ipc_consumer(
            ipc_handle={gpu: decode_handle(data) for gpu, data in handles.items()},
            names=names,
            shapes=arguments["shapes"],
            dtype_names=arguments["dtype_names"],
            tensor_sizes=arguments["tensor_sizes"],
            device_index=device.index,
        )
    gpu = str(torch.cuda.get_device_properties(device.index).uuid)
    opened = []
    for name, handle in zip(names, handles, strict=True):
        if gpu not in handle:
            raise RefitError(f"{name}: came without a handle for GPU {gpu}, only for {sorted(handle)}")
        args = list(decode_handle(handle[gpu]))
        args[6] = device.index  # numbered as in the trainer's process
        opened.append((name, rebuild_cuda_tensor(*args)))
    return opened


def encode_handle(tensor: Tensor) -> list[Any]:
    """A CUDA IPC handle of a tensor, as JSON types. The memory has to live until the receiver is done."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, args = reduce_tensor(tensor)
    (_, size, stride, offset, _, dtype, device, handle, nbytes, start, _, counter, counter_offset, event, sync) = args
    return [
        list(size), list(stride), offset, str(dtype).removeprefix("torch."), device, _hex(handle), nbytes, start,
        _hex(counter), counter_offset, _hex(event), sync,
    ]  # fmt: skip


def decode_handle(data: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of torch's `rebuild_cuda_tensor`."""
    size, stride, offset, dtype, device, handle, nbytes, start, counter, counter_offset, event, sync = data
    return (
        Tensor, torch.Size(size), tuple(stride), offset, torch.storage.TypedStorage, getattr(torch, dtype), device,
        _bytes(handle), nbytes, start, False, _bytes(counter), counter_offset, _bytes(event), sync,
    )  # fmt: skip


def _hex(data: bytes | None) -> str | None:
    return None if data is None else bytes(data).hex()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


__all__ = ["TORCH_DTYPES", "Receivers", "Sink", "decode_handle", "encode_handle"]
