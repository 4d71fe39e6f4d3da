# SPDX-License-Identifier: Apache-2.0
"""Data planes that need neither a GPU nor vLLM: bytes within a message, and files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit.transport import Control, Messenger

_BUCKET = 256 * 2**20
_PREFIX = "quads-refit-"
_OWNER = "owner"


class InlinePlane:
    """Tensors as bytes within the messages of `collective_rpc`: for engines on the CPU of this machine."""

    name = "inline"

    def __init__(self, bucket_bytes: int = 16 * 2**20) -> None:
        self.bucket_bytes = bucket_bytes

    def connect(self, control: Control, instance: str) -> None:
        """Nothing to prepare."""

    def send(self, control: Messenger, tensors: list[tuple[str, Tensor]]) -> None:
        """Serialise and send."""
        control.update({"op": "load", "plane": "inline", "data": save(_on_cpu(tensors))})

    def close(self) -> None:
        """Nothing to give back."""


class DiskPlane:
    """Tensors as safetensors files in a directory that trainer and engine both see; each file lives for one message.

    Directories that killed trainers of this user have left on this machine are removed when a new one is made.
    """

    name = "disk"

    def __init__(self, directory: str | Path | None = None, bucket_bytes: int = _BUCKET) -> None:
        """directory: None makes one below the system's temporary directory, which fits an engine on this machine."""
        self.bucket_bytes = bucket_bytes
        self._parent = None if directory is None else Path(directory)
        self._directory: Path | None = None
        self._remove: weakref.finalize[Any, Any] | None = None
        """Removes the directory, at the latest when this object or the process ends."""
        self._lock: IO[str] | None = None

    def connect(self, control: Control, instance: str) -> None:
        """Make the directory. Raises RefitError if that cannot be."""
        if self._directory is not None and self._directory.is_dir():
            return
        try:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self._parent or Path(tempfile.gettempdir()))
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
            self._directory.chmod(0o755)  # the engine may run as another user
            self._lock = _owned(self._directory)
        except OSError as e:
            raise RefitError(f"{self._parent}: cannot hold the tensors of a refit ({e}); name another directory") from e

    def send(self, control: Messenger, tensors: list[tuple[str, Tensor]]) -> None:
        """Write a file, have it read, delete it."""
        assert self._directory is not None
        path = self._directory / f"{uuid.uuid4().hex}.safetensors"
        try:
            save_file(_on_cpu(tensors), path)
            path.chmod(0o644)
        except (OSError, SafetensorError) as e:
            path.unlink(missing_ok=True)
            raise RefitError(f"{path}: cannot be written ({e}); free space, or name another directory") from e
        try:
            control.update({"op": "load", "plane": "disk", "file": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory."""
        if self._remove is not None:
            self._remove()
        if self._lock is not None:
            self._lock.close()
        self._directory, self._lock = None, None


def _machine() -> str:
    """Within one boot of one kernel, locks are seen by all; elsewhere (network file systems) they may not be."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _owned(directory: Path) -> IO[str]:
    """A locked file in the directory, whose lock ends with this process."""
    draft = directory / f"{_OWNER}.new"
    file = draft.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    with contextlib.suppress(OSError):
        file.write(_machine())
    file.flush()
    draft.rename(directory / _OWNER)  # not before it is locked
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's directories whose owners have died on this machine."""
    for file in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            if file.parent.lstat().st_uid != os.getuid():
                continue
            with file.open() as owner:
                if owner.read() != _machine():
                    continue
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
                shutil.rmtree(file.parent, ignore_errors=True)


def _on_cpu(tensors: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    # Cloned where several names share one storage, which safetensors refuses.
    out: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        if name in out:
            raise RefitError(f"{name}: was already sent in this push")
        host = tensor.detach().to("cpu").contiguous()
        pointer = host.untyped_storage().data_ptr()
        out[name] = host.clone() if pointer in storages else host
        storages.add(pointer)
    return out


__all__ = ["DiskPlane", "InlinePlane"]
