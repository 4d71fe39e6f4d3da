# SPDX-License-Identifier: Apache-2.0
"""Write the model as a `quads` checkpoint, which `vllm serve` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainer_qat.payload import Item, Payload
from trainer_qat.prepare import save_frozen
from trainer_qat.ranks import Ranks, drain
from vllm_quads.checkpoint import CheckpointWriter, Format
from vllm_quads.checkpoint.writer import writing
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor
from vllm_quads.refit import CollectiveError

DEFAULT_SHARD_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class ExportReport:
    """What `export_checkpoint` wrote."""

    path: Path
    fingerprint: str
    """Fingerprint of the packed weights; an engine that serves the checkpoint reports the same."""
    quantized: int
    """Packed matrices."""


def export_checkpoint(
    model: nn.Module,
    dst: Path | str,
    contract: Contract | None = None,
    *,
    tokenizer: Any = None,
    compensation: CompensationState | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> ExportReport:
    """Quantize the master weights and write a checkpoint directory that appears complete, or not at all.

    Args:
        model: a Hugging Face model, prepared or not. Under FSDP2 every rank calls this; rank 0 writes, parameters are
            gathered one at a time, and an error on one rank is raised on all. Under DistributedDataParallel one rank
            calls this.
        dst: directory to create.
        contract: None takes that of the prepared model.
        tokenizer: saved with the checkpoint (anything with `save_pretrained`), or a directory whose files are copied.
        compensation: state of residual compensation to store (see `trainer_qat.calibration`).
        max_shard_bytes: size of a shard; bounds the CPU memory used.
        overwrite: replace an existing `dst`.

    Raises:
        CheckpointError: `dst` is in the way or cannot be written.
        MismatchError: the contract is not the one that the model trains with.
        FormatError: a weight holds NaN or Inf, naming it.
    """
    ranks = Ranks.of(model)
    with ranks.together(f"the export to {dst}"):
        payload = Payload(model, contract)
        payload.specs()  # refuses unsupported families before anything is written
        if not (tokenizer is None or isinstance(tokenizer, (str, Path)) or hasattr(tokenizer, "save_pretrained")):
            raise ContractError(
                f"tokenizer: is {type(tokenizer).__name__}, expected a tokenizer, or a directory with one"
            )
    path, fingerprint = Path(dst), ""
    error: BaseException | None = None
    items = payload.items()
    try:
        if ranks.leads:
            writer = CheckpointWriter(
                dst,
                format=Format.QUADS,
                contract=payload.contract,
                config=_config(payload.model),
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
            )
            path, fingerprint = _write(writer, items, payload, model, tokenizer, compensation)
        drain(items)
    except CollectiveError:
        raise
    except BaseException as e:
        error = e
        if ranks.sharded:  # the others wait in a gather until this one has seen everything
            try:
                drain(items)
            except CollectiveError:
                raise
            except Exception:
                pass  # what has gone wrong first is told
    error = ranks.agree(error, f"the export to {dst}")
    if error is not None:
        raise error
    return ExportReport(path, ranks.share(fingerprint), len(payload.quantized))


def _write(
    writer: CheckpointWriter,
    items: Iterator[Item],
    payload: Payload,
    model: nn.Module,
    tokenizer: Any,
    compensation: CompensationState | None,
) -> tuple[Path, str]:
    """Write everything; (path, fingerprint)."""
    files = tokenizer if isinstance(tokenizer, (str, Path)) else None
    with writer:
        for item in items:
            _add(writer, item)
        with writing(writer.dst):
            generation = getattr(payload.model, "generation_config", None)
            if generation is not None:
                generation.save_pretrained(writer.directory)
            save_frozen(model, writer.directory)
            if tokenizer is not None and files is None:
                tokenizer.save_pretrained(writer.directory)
        return writer.finish(copy_files_from=files, compensation=compensation), writer.fingerprint


def _add(writer: CheckpointWriter, item: Item) -> None:
    if isinstance(item.value, PackedTensor):
        writer.add_packed(item.name, item.value)
    else:
        writer.add(item.name, item.value)


def _config(model: nn.Module) -> dict[str, Any]:
    """config.json of the plain model. Raises ContractError for a model without a Hugging Face config."""
    if not hasattr(model, "config"):
        raise ContractError(
            f"{type(model).__name__} has no Hugging Face config, without which an engine cannot load a checkpoint"
        )
    config: dict[str, Any] = json.loads(model.config.to_json_string())  # type: ignore[union-attr, operator]
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = "float16" if str(next(model.parameters()).dtype) == "torch.float16" else "bfloat16"
    config.pop("quantization_config", None)
    return config
