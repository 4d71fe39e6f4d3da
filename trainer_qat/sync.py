# SPDX-License-Identifier: Apache-2.0
"""Push the trainer's weights into a running rollout engine, and prove that they arrived.

The engine is anything that `vllm_quads.refit.as_engine` accepts; this package does not know vLLM. Contract and tensor
set are compared before a byte moves, digests of all tensors before they serve.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from trainer_qat.interrupts import uninterrupted
from trainer_qat.payload import Payload
from trainer_qat.push import Push
from trainer_qat.push_stream import PushStream
from trainer_qat.ranks import Ranks
from vllm_quads.nvfp4 import Contract, ContractError, MismatchError, RefitError, WeightGlobalScale, first_difference
from vllm_quads.refit import (
    CollectiveEngine,
    CollectiveError,
    Manifest,
    RefitReport,
    Rollback,
    RolloutEngine,
    TensorSpec,
    as_engine,
)


class RolloutSync:
    """Pushes one model into one engine, as often as wanted.

        sync = RolloutSync(model, llm)
        report = sync.push()

    Under FSDP2 every rank makes one and pushes; ranks without an engine of their own pass None and take part in the
    gathering. Parameters are gathered one at a time.
    """

    def __init__(
        self, model: nn.Module, engine: Any, *, contract: Contract | None = None, progress: bool = False
    ) -> None:
        """Compare trainer and engine.

        Args:
            model: a prepared model (or a plain one together with a contract).
            engine: an in-process vLLM `LLM`, or a `vllm_quads.refit.RolloutEngine`.
            contract: None takes that of the prepared model.
            progress: show a progress line while pushing.

        Raises:
            MismatchError: contract or tensor set differ; names the first difference.
            RefitError: the engine is of a kind that nothing knows.
        """
        self.payload = Payload(model, contract)
        self.engine: RolloutEngine | None = None if engine is None else as_engine(engine)
        self._progress = progress
        if self.engine is not None:
            self._check(self.engine)

    def _check(self, engine: RolloutEngine) -> None:
        difference = first_difference(self.payload.contract, engine.contract())
        if difference is not None:
            raise MismatchError(
                f"trainer and rollout follow different contracts (trainer != rollout): {difference}; start the engine "
                f"with the trainer's contract, or prepare the model with the engine's"
            )
        self.payload.quantized.require_equal(engine.quantized())

    def push(
        self,
        policy_version: int | None = None,
        sensitivities: Mapping[str, float] | None = None,
        *,
        packed: bool = True,
        rollback: Rollback | str = Rollback.HOST,
        verify: bool = True,
    ) -> RefitReport:
        """Send all weights; afterwards they serve, or the previous ones still do, or the engine refuses to serve.

        Args:
            policy_version: None counts on from the engine's version; a version that is not newer is refused.
            sensitivities: see `trainer_qat.sensitivities`; the engine spends its compensation budget by them.
            packed: send quantized weights in NVFP4 (28 % of the BF16 bytes); with False the engine quantizes BF16
                weights itself, with the same result.
            rollback: what a failure after the first written layer leaves: "host" keeps the previous weights serving,
                for a copy of the packed model in host memory; "none" leaves an engine that refuses until the next push.
            verify: digest the weights here as well and let the engine compare: quantized weights unit by unit, the
                others tensor by tensor.

        Returns:
            The engine's report, with the trainer's own phases added to its seconds.

        Raises:
            MismatchError: contract or tensor set differ.
            RefitError: the engine refused or failed; the message says what serves now. Of a sharded model
                `CollectiveError` if a gather itself failed on this rank, whose process then has to end.
            FormatError: a weight holds NaN or Inf, naming it; the engine has heard nothing.
            ContractError: a sensitivity is not a finite number of at least 0, the version not an integer, or the
                rollback not one of the two.
        """
        ranks = Ranks.of(self.payload.model)
        # Where others wait for this rank, Ctrl-C waits as well; `Push` lets it through where they do not.
        with uninterrupted(ranks.sharded or isinstance(self.engine, CollectiveEngine)):
            start = time.perf_counter()
            stream, manifest, engines_vote = self._offer(ranks, packed, verify, policy_version, sensitivities, rollback)
            checked = time.perf_counter() - start
            report = Push(ranks, stream, engines_vote=engines_vote).run(self.engine, manifest, self._progressing)
        if report is None:
            return RefitReport(policy_version or 0, "", 0, 0, {})
        return report.with_seconds(trainer_check=checked, trainer_total=time.perf_counter() - start)

    def _offer(
        self,
        ranks: Ranks,
        packed: bool,
        verify: bool,
        version: int | None,
        sensitivities: Mapping[str, float] | None,
        rollback: Rollback | str,
    ) -> tuple[PushStream, Manifest | None, bool]:
        """Look at the weights, and say what is to be sent (None: this rank has no engine); no engine is told yet.

        Raises on all ranks or on none. The last of what is returned: whether the engine of any rank is a
        `CollectiveEngine`.
        """
        try:
            with ranks.together("the push", RefitError):
                _check_version(version)
                way_back = _checked_rollback(rollback)
                compensation = _checked_sensitivities({} if sensitivities is None else sensitivities)
                scale = self.payload.contract.weight_global_scale
                if not packed and scale is not WeightGlobalScale.LIVE:
                    raise ContractError(
                        f"packed=False: an engine cannot know {scale.value} scales; push packed weights"
                    )
                stream = PushStream(self.payload, packed=packed, digest=verify)
                stream.measure()
            stream.combine()
            manifest = None
            with ranks.together("the push", RefitError):
                if self.engine is not None:  # while the device measures
                    manifest = self._manifest(self.engine, stream.specs(), version, compensation, way_back, verify)
                stream.check()
            return stream, manifest, any(ranks.gather(isinstance(self.engine, CollectiveEngine)))
        except CollectiveError:
            raise
        except BaseException as e:
            if isinstance(self.engine, CollectiveEngine):  # its other ranks may wait for this one in `begin`
                self.engine.decline(e)
            raise

    def _manifest(
        self,
        engine: RolloutEngine,
        specs: Mapping[str, TensorSpec],
        version: int | None,
        compensation: Mapping[str, float],
        rollback: Rollback,
        verify: bool,
    ) -> Manifest:
        self._check(engine)
        return Manifest(
            contract=self.payload.contract,
            quantized=self.payload.quantized,
            tensors=specs,
            policy_version=engine.policy_version() + 1 if version is None else version,
            compensation=compensation,
            rollback=rollback,
            verify=verify,
        )

    def _progressing(self, tensors: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
        total = sum(p.nbytes for _, p in self.payload.parameters()) if self._progress else 0
        with _progress_line(self._progress, total) as advance:
            for name, tensor in tensors:
                yield name, tensor
                advance(tensor)


def _check_version(version: object) -> None:
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise ContractError(f"policy_version: is {version!r}, expected an integer of at least 0, or None to count on")


def _checked_rollback(rollback: Rollback | str) -> Rollback:
    try:
        return Rollback(rollback)
    except ValueError:
        raise ContractError(f"rollback: is {rollback!r}, expected one of {[r.value for r in Rollback]}") from None


def _checked_sensitivities(values: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise ContractError(
            f"sensitivities: is {type(values).__name__}, expected site name -> number (see trainer_qat.sensitivities)"
        )
    for name, value in values.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(name, str) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ContractError(f"sensitivities[{name!r}]: is {value!r}, expected a finite number of at least 0")
    return {name: float(value) for name, value in values.items()}


@contextlib.contextmanager
def _progress_line(show: bool, total: int) -> Iterator[Callable[[Tensor], None]]:
    if not show:
        yield lambda tensor: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("push"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("push", total=total)
        yield lambda tensor: bar.update(task, advance=tensor.nbytes)
