# SPDX-License-Identifier: Apache-2.0
"""An in-process `LLM` that is one rank of a parallel engine: vLLM's external launcher, one process for each rank.

    # in every process that torchrun has started
    llm = LLM(NAME, quantization="quads", tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    RolloutSync(model, llm).push()

Every rank is pushed to by the trainer in its own process, with whole tensors of which it takes its shard. The ranks
decide together, at two moments: whether the refit begins, and whether it is committed. A rank that fails in between
says so at the second, so that every rank that has begun takes part in it once, through `commit`, `abort` or a `load`
that fails. After the second all ranks say how it has ended for them, those that have committed as well: if that is not
the same everywhere, no rank serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import RefitError, unit_fingerprint
from vllm_quads.plugin import compat
from vllm_quads.plugin.engine import VllmEngine
from vllm_quads.plugin.refit_checks import check_parallel
from vllm_quads.refit import CollectiveError, Manifest, RefitReport
from vllm_quads.refit.report import without_outcome


class LaunchedEngine(VllmEngine):
    """`vllm_quads.refit.RolloutEngine` for one rank. All ranks have to make the same calls of `begin`, `load`, `commit`
    and `fingerprint`; the rest is answered by each alone."""

    collective = True
    """See `vllm_quads.refit.CollectiveEngine`."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._begun = False
        """True while this rank owes the others the second vote."""

    # -- the first vote ------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        """As `VllmEngine.begin`, on all ranks or on none: also raises RefitError if another rank cannot begin, or is to
        get another policy version. A collective."""
        error: BaseException | None = None
        try:
            check_parallel(self._llm.llm_engine.vllm_config.parallel_config)
            super().begin(manifest)
        except BaseException as e:
            error = e
        try:
            _vote(error, (manifest.policy_version, manifest.rollback.value), "policy version and rollback")
        except BaseException:
            if error is None:
                super().abort()
            raise
        self._begun = True

    def decline(self, error: BaseException) -> None:
        """Let the others' `begin` fail, because this rank's trainer does not come to call its own. A collective."""
        _tell(error)

    # -- the second ----------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As `VllmEngine.load`. An iterator is used up even after an error, because the other ranks may wait for this
        one where sharded parameters are gathered."""
        source = iter(tensors)
        try:
            super().load(tensors)
        except BaseException as e:
            if not self._begun or not isinstance(e, Exception):
                raise  # after an interrupt the caller aborts, once it has done what other ranks wait for
            if _is_alone(e):
                self._begun = False
                raise
            if source is iter(tensors):  # an iterator, which goes on where it stands; a sequence would begin again
                with contextlib.suppress(Exception):
                    for _ in source:
                        pass
            raise self._given_up(e) from e

    def commit(self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None) -> RefitReport:
        """As `VllmEngine.commit`, on all ranks or on none: also raises RefitError if another rank has failed, or has
        got other weights. A collective."""
        if not self._begun:
            super().load(())  # says how the refit has ended
            raise RefitError("no refit is under way on this rank; call begin(manifest) first")
        self._begun = False
        error: BaseException | None = None
        report: RefitReport | None = None
        try:
            self._prepare_commit()
        except BaseException as e:
            error = e
        try:
            _vote(error, None if digests is None else unit_fingerprint(digests), "fingerprint")
            report = self._session(lambda session: session.commit(digests, plain))
        except BaseException as e:
            error = e
        ended = self._ended(error)
        if ended is not None:
            raise ended from error
        assert report is not None
        return report

    def abort(self) -> None:
        """End the refit that is under way, if there is one, on all ranks: the others are told at their `commit`."""
        if self._begun:
            self._given_up(RefitError("the push was given up"))
        else:
            super().abort()

    def _given_up(self, error: BaseException) -> BaseException:
        """Vote against the commit; returns what to raise."""
        self._begun = False
        _tell(error)
        return self._ended(error) or error

    def _ended(self, error: BaseException | None) -> BaseException | None:
        """End the refit in the same way on all ranks. A collective: after the second vote every rank comes here once,
        also one that has committed.

        error: why this rank has not, or None. Returns what to raise, which may be that another rank has not.
        """
        ended = error
        if error is not None:
            reason = error if isinstance(error, RefitError) else RefitError(_text(error))
            try:
                ended = self._session(lambda session: session.fail(reason))
            except BaseException as e:  # in the rollback: nothing serves
                ended = e
        text = None if error is None else _text(error)
        outcome = self._session(lambda session: session.settle(text))
        if outcome is not None:
            ended = RefitError(outcome if ended is None else f"{without_outcome(str(ended))}; {outcome}")
        return ended if error is None or isinstance(error, Exception) else error

    # -- what one rank cannot answer -----------------------------------------------------------------------------

    def compensation(self) -> CompensationState:
        """Raises RefitError: a rank has the state of its shard."""
        raise RefitError("each rank of this engine has the compensation state of its shard; ask an engine of one rank")

    def refresh_compensation(self, sensitivities: Mapping[str, float] | None = None) -> NoReturn:
        """Raises RefitError: it belongs into a push, which all ranks make."""
        raise RefitError("the compensation of a parallel engine is chosen at a push; use push(sensitivities=...)")


def _vote(error: BaseException | None, value: Any, what: str) -> None:
    """Raise this rank's error, or else RefitError for another rank's or if the ranks have different values."""
    votes = compat.gather((None if error is None else _text(error), value))
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(votes):
        if message is not None:
            raise RefitError(f"the refit failed on rank {rank}: {message}")
    for rank, (_, other) in enumerate(votes):
        if other != votes[0][1]:
            raise RefitError(
                f"the ranks of this engine are to get different weights: {what} {votes[0][1]} on rank 0, {other} on "
                f"rank {rank}; push one policy on all of them"
            )


def _is_alone(error: BaseException | None) -> bool:
    """True if the trainer has lost the other ranks, which so do not come to a vote."""
    while error is not None and not isinstance(error, CollectiveError):
        error = error.__cause__
    return error is not None


def _tell(error: BaseException) -> None:
    """A vote against."""
    compat.gather((_text(error), None))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_outcome(str(error))}"


__all__ = ["LaunchedEngine"]
