# SPDX-License-Identifier: Apache-2.0
"""`CheckpointReader`: a Hugging Face checkpoint directory, its headers read once and its tensors on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_quads.checkpoint.headers import TensorHeader, read_header
from vllm_quads.nvfp4.errors import CheckpointError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointReader:
    """Reads a checkpoint directory (`config.json` and safetensors, with or without an index).

    Construction reads all headers and raises CheckpointError for anything missing, truncated or contradictory.
    Shards are memory-mapped when first used; use as a context manager, or call `close`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            hint = " (a model name of a hub? download it first)" if not self.path.exists() else ""
            raise CheckpointError(f"{path}: is not a directory{hint}; expected a checkpoint with {CONFIG}")
        self.config = read_json(self.path / CONFIG)
        self.headers = self._read_headers()
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def _read_headers(self) -> dict[str, TensorHeader]:
        index = self.path / INDEX
        if not index.exists():
            files = (
                [SINGLE] if (self.path / SINGLE).exists() else sorted(p.name for p in self.path.glob("*.safetensors"))
            )
            if not files:
                raise CheckpointError(f"{self.path}: holds no safetensors file{_other_weights(self.path)}")
            return _merge(self.path, files)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: has no weight_map; write the checkpoint again")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{index}: lists {name} in {file!r}, expected the name of a file beside the index"
                )
        headers = _merge(self.path, sorted(set(weight_map.values())))
        for name, file in weight_map.items():
            if name not in headers:
                raise CheckpointError(f"{index}: lists {name} in {file}, which does not hold it; copy that shard again")
        return headers

    @property
    def names(self) -> list[str]:
        """Tensor names in the order of the files (shard by shard)."""
        return list(self.headers)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(h.nbytes for h in self.headers.values())

    def get(self, name: str) -> Tensor:
        """One tensor, on CPU. Raises CheckpointError if the checkpoint does not hold it or the shard is damaged."""
        header = self.headers.get(name)
        if header is None:
            raise CheckpointError(f"{self.path}: holds no tensor {name}")
        try:
            if header.file not in self._open:
                self._open[header.file] = self._stack.enter_context(safe_open(self.path / header.file, framework="pt"))
            tensor: Tensor = self._open[header.file].get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{self.path / header.file}: cannot be read ({e}); copy or download it again") from e
        return tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, shard by shard."""
        for name in self.headers:
            yield name, self.get(name)

    def close(self) -> None:
        """Release the memory maps."""
        self._open.clear()
        self._stack.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror}); is this a checkpoint directory?") from e
    except ValueError as e:
        raise CheckpointError(f"{path}: is not valid JSON ({e})") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, expected a JSON object")
    return data


def _other_weights(path: Path) -> str:
    found = next(
        (p.name for suffix in ("bin", "pt", "pth", "gguf", "h5") for p in sorted(path.glob(f"*.{suffix}"))), None
    )
    if found is None:
        return "; download the weights, or name the directory that has them"
    return (
        f", only {found}; convert it, for example with transformers: "
        f"AutoModelForCausalLM.from_pretrained({str(path)!r}, dtype='auto').save_pretrained(...)"
    )


def _merge(path: Path, files: list[str]) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in read_header(path / file).items():
            if name in headers:
                raise CheckpointError(f"{path}: {name} is in both {headers[name].file} and {file}; remove one of them")
            headers[name] = header
    return headers
