# SPDX-License-Identifier: Apache-2.0
"""`CheckpointWriter`: streams tensors into a checkpoint directory that appears complete and verified, or not at all.

    with CheckpointWriter(dst, format="quads", contract=contract, config=model.config.to_dict()) as writer:
        writer.add("model.norm.weight", tensor)
        writer.add_packed("model.layers.0.mlp.experts.0.gate_proj", packed)
        writer.finish(copy_files_from=base)

Shards are written to a hidden directory beside `dst` and renamed into place by `finish`, after they were synced to
disk, read back, and their fingerprint compared. A run that is interrupted leaves that hidden directory; the next one to
the same `dst` clears it and starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vllm_quads.checkpoint.disk_names import check_stack, disk_name, is_stack, unstack, unstack_packed
from vllm_quads.checkpoint.layouts import LAYOUTS, Format
from vllm_quads.checkpoint.load import fingerprint_checkpoint
from vllm_quads.checkpoint.quant_configs import HF_QUANT_CONFIG, check_storable, hf_quant_config, quantization_config
from vllm_quads.checkpoint.reader import CONFIG, INDEX
from vllm_quads.checkpoint.verify import verify_headers
from vllm_quads.compensation.state import CompensationState
from vllm_quads.nvfp4.contract import Contract, Scheme
from vllm_quads.nvfp4.errors import CheckpointError
from vllm_quads.nvfp4.fingerprint import fingerprint, packed_digest
from vllm_quads.nvfp4.names import canonical_name
from vllm_quads.nvfp4.packed import PackedTensor

DEFAULT_SHARD_BYTES = 2 * 1024**3
UNCALIBRATED_INPUT_SCALE = 1.0
"""input_scale (amax/2688) written for W4A4 in foreign formats without calibration: block scales alone carry the range,
as in ModelOpt's recipes with a constant amax of 2688."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
CHAT_TEMPLATES = "additional_chat_templates"
"""The one directory that transformers keeps tokenizer files in."""
_OWN_FILES = (CONFIG, HF_QUANT_CONFIG)


def require_free(dst: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError if something is at `dst` that may not be replaced."""
    target = dst.resolve()
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{dst}: is a file; choose a directory that does not exist yet")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{dst}: exists and is not empty; choose another directory, or replace the checkpoint in it with "
            f"`overwrite` (--overwrite)"
        )
    if not (target / CONFIG).is_file():
        raise CheckpointError(
            f"{dst}: is not empty and holds no {CONFIG}, so it is no checkpoint and is not overwritten; "
            f"choose another directory or remove it yourself"
        )


class CheckpointWriter:
    """Writes one checkpoint; see the module docstring. Names may be canonical, on-disk, or fused 3-D stacks."""

    def __init__(
        self,
        dst: str | Path,
        *,
        format: Format | str = Format.QUADS,
        contract: Contract | None = None,
        config: Mapping[str, Any],
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Prepare a checkpoint at `dst`.

        Args:
            dst: directory to create.
            format: `quads`, `modelopt` or `compressed-tensors`.
            contract: what the packed tensors are; Contract() if None.
            config: the model's config.json (decides on-disk names, written with `quantization_config` added).
            max_shard_bytes: a shard is written when this many bytes are collected; bounds the memory used.
            overwrite: replace an existing checkpoint at `dst` at the end of `finish`. Anything else (a file, a
                directory without config.json) is never removed.

        Raises:
            CheckpointError: `dst` is in the way, cannot be written, or another process is writing to it.
            ContractError: the format cannot store an option of the contract.
        """
        self.dst = Path(dst)
        self._target = self.dst.resolve()  # what a link points at is replaced, not the link
        self.format = Format(format)
        if self.format is Format.BF16:
            raise CheckpointError("format: bf16 holds no packed weights; choose quads, modelopt or compressed-tensors")
        self.contract = contract or Contract()
        check_storable(self.contract, self.format)
        self.config = dict(config)
        self._max = max_shard_bytes
        self._overwrite = overwrite
        self.directory = self._target.parent / f".{self._target.name}.partial"
        """Where files are written until `finish`; add further files of the checkpoint here."""
        with writing(self.dst):
            if self._replaced.exists() and not self._target.exists():  # a run died between the renames of `_publish`
                self._replaced.rename(self._target)
            require_free(self.dst, overwrite=overwrite)
            self._lock = self._claim()
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._files: list[list[str]] = []  # tensor names of each written shard
        self._total = 0
        self._seen: set[str] = set()
        self._digests: dict[str, int] = {}
        self._packed_modules: list[str] = []
        self._other_modules: list[str] = []

    @property
    def _replaced(self) -> Path:
        return self._target.parent / f".{self._target.name}.replaced"

    def _claim(self) -> int:
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(lock)
            raise CheckpointError(f"{self.directory}: another process is writing this checkpoint; wait for it") from e
        for left in self.directory.iterdir():  # of a run that was interrupted
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return lock

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the packed weights added so far."""
        return fingerprint(self._digests)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that is not quantized, as it is. A fused 3-D stack of experts is split into its matrices.

        Raises CheckpointError for a name that was added before.
        """
        if is_stack(name, tensor.dim()):
            check_stack(name, tuple(tensor.shape), self.config)
            for module, matrix in unstack(name, tensor):
                self.add(f"{module}.weight", matrix)
            return
        name = disk_name(name, self.config)
        if tensor.dim() == 2 and name.endswith(".weight"):
            self._other_modules.append(name.removesuffix(".weight"))
        self._put(name, tensor)

    def add_packed(self, name: str, packed: PackedTensor, *, input_scale: float | None = None) -> None:
        """Add a packed weight under its module name (`.weight` at the end is ignored), or a packed stack of experts.

        `input_scale` is the static activation scale, decode direction (amax/2688). Raises CheckpointError for a name
        that was added before.
        """
        if len(packed.shape) == 3:
            check_stack(name, packed.shape, self.config)
            for module, matrix in unstack_packed(name, packed):
                self.add_packed(module, matrix, input_scale=input_scale)
            return
        module = disk_name(name.removesuffix(".weight"), self.config)
        if input_scale is None and self.format is not Format.QUADS and self.contract.scheme is Scheme.W4A4:
            input_scale = UNCALIBRATED_INPUT_SCALE
        for tensor_name, tensor in LAYOUTS[self.format].tensors(module, packed, input_scale).items():
            self._put(tensor_name, tensor)
        self._packed_modules.append(module)
        self._digests[canonical_name(module)] = int(packed_digest(packed))

    def _put(self, name: str, tensor: Tensor) -> None:
        if name in self._seen:
            raise CheckpointError(f"{name}: was added twice; each tensor belongs into a checkpoint once")
        self._seen.add(name)
        # A copy of its own: views of one storage, and maps of a file that is about to close, cannot be saved.
        self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._shard_bytes += tensor.nbytes
        if self._shard_bytes >= self._max:
            self._flush()

    def _flush(self) -> None:
        if self._shard:
            path = self.directory / _shard_name(len(self._files))
            with writing(self.dst):
                save_file(self._shard, path, metadata={"format": "pt"})
                os.chmod(path, 0o666 & ~_umask())  # the library makes files for the owner only
                _sync(path)
            self._files.append(list(self._shard))
            self._total += self._shard_bytes
            self._shard, self._shard_bytes = {}, 0

    def finish(
        self,
        config_updates: Mapping[str, Any] | None = None,
        copy_files_from: str | Path | None = None,
        compensation: CompensationState | None = None,
    ) -> Path:
        """Write what is left, verify all of it, and move the checkpoint to `dst`; returns `dst`.

        Args:
            config_updates: keys of config.json to set.
            copy_files_from: a checkpoint whose other files (tokenizer, generation config, code) are copied.
            compensation: state to store in `quads/compensation.safetensors`.

        Raises:
            CheckpointError: the disk is full or not writable, or what was written does not read back as what was added.
        """
        self._flush()
        with writing(self.dst):
            if copy_files_from is not None:
                _copy_side_files(Path(copy_files_from), self.directory)
            self._write_index()
            self._write_config(config_updates or {})
            if compensation is not None:
                _sync(compensation.save(self.directory))
            self._verify()
            _sync(self.directory)
            self._publish()
        return self.dst

    def _write_index(self) -> None:
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            (self.directory / _shard_name(i)).rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(self.directory / INDEX, index)

    def _write_config(self, updates: Mapping[str, Any]) -> None:
        config = {**self.config, **updates}
        config.pop("compression_config", None)
        arguments = (self.contract, self._packed_modules, self._other_modules)
        config["quantization_config"] = quantization_config(self.format, *arguments)
        _write_json(self.directory / CONFIG, config)
        if self.format is Format.MODELOPT:
            _write_json(self.directory / HF_QUANT_CONFIG, hf_quant_config(*arguments))

    def _verify(self) -> None:
        verify_headers(self.directory)
        found = fingerprint_checkpoint(self.directory)
        if found != self.fingerprint:
            raise CheckpointError(
                f"{self.directory}: reads back with fingerprint {found}, expected {self.fingerprint}; "
                f"the disk may be faulty or full"
            )

    def _publish(self) -> None:
        old = self._replaced
        shutil.rmtree(old, ignore_errors=True)
        require_free(self.dst, overwrite=self._overwrite)  # the run took a while
        if self._target.exists() and any(self._target.iterdir()):
            self._target.rename(old)
        try:
            self.directory.rename(self._target)
        except OSError:
            if old.exists():
                old.rename(self._target)
            raise
        _sync(self._target.parent)
        shutil.rmtree(old, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def abort(self) -> None:
        """Remove what was written so far; does nothing after `finish`."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
        self._shard = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


@contextlib.contextmanager
def writing(dst: Path) -> Iterator[None]:
    """Errors of the file system while a checkpoint is written, as CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        name = getattr(e, "filename", None)
        reason = f"{getattr(e, 'strerror', None) or e}" + (f": {name}" if name else "")
        raise CheckpointError(
            f"{dst}: cannot be written ({reason}); free space, or choose a directory that you may write to"
        ) from e


def _shard_name(i: int) -> str:
    return f"shard-{i:05d}.safetensors"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


def _copy_side_files(src: Path, dst: Path) -> None:
    if not src.is_dir():
        raise CheckpointError(f"{src}: is not a directory, so no tokenizer or other files can be copied from it")
    for path in sorted([*src.iterdir(), *(src / CHAT_TEMPLATES).glob("*")]):
        weights = path.suffix in _WEIGHT_FILES or path.name.endswith(".index.json")
        if weights or path.name.startswith(".") or path.name in _OWN_FILES:
            continue
        if path.is_symlink() and not path.exists():  # a snapshot of a hub links into its store
            raise CheckpointError(f"{path}: is a link to nothing; download the checkpoint again")
        if path.is_file():
            copy = dst / path.relative_to(src)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            _sync(copy)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
