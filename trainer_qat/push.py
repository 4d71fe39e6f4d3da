# SPDX-License-Identifier: Apache-2.0
"""One push, from the engine's `begin` to the end, on one of the ranks that share a model.

What ranks of a sharded model do together, each of them in this order, whatever fails on it:

    gather every tensor             a rank whose engine or own work has failed goes on gathering
    say what has failed, and which weights have changed
    say whether the engine is ready to commit     (a `CollectiveEngine` asks its ranks itself)
    say how it has ended

Nothing is committed anywhere unless all ranks have said at the second and third that all is well. Only a rank on which
a collective itself fails leaves at once (CollectiveError): the others could not tell what it does next from what they
wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from trainer_qat.interrupts import interruptible, uninterrupted, whole_steps
from trainer_qat.push_stream import PushStream
from trainer_qat.ranks import Ranks
from vllm_quads.nvfp4 import MismatchError, QuadsError, RefitError
from vllm_quads.refit import CollectiveEngine, CollectiveError, Lasting, Manifest, RefitReport, RolloutEngine
from vllm_quads.refit.report import KEEP_SERVING, EngineState, says_what_serves

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Ending:
    """How a push has ended on one rank."""

    error: str | None
    heard: bool
    """True for an error that is another rank's."""
    serves: str
    """What its engine serves, if the error does not say so."""
    report: RefitReport | None


class Push:
    """One push on this rank; `run` once."""

    def __init__(self, ranks: Ranks, stream: PushStream, *, engines_vote: bool) -> None:
        """engines_vote: one of the ranks has a `CollectiveEngine`."""
        self._ranks = ranks
        self._stream = stream
        self._concluded = not ranks.sharded
        self._asked = not ranks.sharded or engines_vote
        self._failed: BaseException | None = None
        """What all ranks know to be wrong, as this one puts it."""
        self._heard: BaseException | None = None
        """The failure that this rank knows from another."""
        self._lost: CollectiveError | None = None
        """The collective that has failed here; this rank enters no other."""
        self._serves = ""
        """What this rank's engine serves after a failure, as far as it says so."""

    def run(
        self, engine: RolloutEngine | None, manifest: Manifest | None, watch: Callable[[Tensors], Tensors]
    ) -> RefitReport | None:
        """The report of the rank that has an engine; None if there is none.

        watch: wrapped around the tensors that are sent. Raises as `RolloutSync.push` does, on all ranks or on none.
        """
        report: RefitReport | None = None
        error: BaseException | None = None
        try:
            if engine is None or manifest is None:
                error = self._agree_to_commit(None)
            else:
                report = self._transfer(engine, manifest, watch)
        except BaseException as e:
            error = e
        if self._ranks.sharded and self._lost is None:
            return self._settle(report, None if error is self._heard else error)
        if error is not None:
            raise error
        return report

    # -- the rank with the engine ------------------------------------------------------------------------------------

    def _transfer(self, engine: RolloutEngine, manifest: Manifest, watch: Callable[[Tensors], Tensors]) -> RefitReport:
        # Ctrl-C may end what only this rank waits for: in a vote of the engine others wait for it. A commit that was
        # interrupted may have happened, and the others would be told that it failed.
        alone = not isinstance(engine, CollectiveEngine)
        stream, began, last = self._stream, False, "(nothing yet)"

        def sent() -> Generator[tuple[str, Tensor], None, None]:
            nonlocal last
            steps = stream.tensors()
            try:
                for name, tensor in watch(whole_steps(steps) if stream.sharded else steps):
                    last = name
                    yield name, tensor
                if stream.sharded:  # what may fail has to fail before all ranks say that they are well
                    stream.digests()
                    stream.plain_digests()
            except Exception as e:
                # All ranks come to the end first: an engine that hears of the error may wait for them in a vote.
                self._conclude(e)
                raise
            error = self._conclude(None)
            if error is not None:
                raise error

        tensors = sent()
        try:
            with interruptible() if alone else nullcontext():
                engine.begin(manifest)
                began = True
                engine.load(Lasting(tensors, resident=stream.resident))
            stream.check_unchanged()
            digests, plain, fingerprint = stream.digests(), stream.plain_digests(), stream.fingerprint()
            error = self._agree_to_commit(None)
            if error is not None:
                raise error
            report = engine.commit(digests, plain)
        except BaseException as e:
            self._agree_to_commit(e)  # unless all ranks know, or none can be told
            if began or not isinstance(e, QuadsError):  # a push that was refused has ended; what is open is another's
                _abort(engine, e)
                self._serves = _what_serves(engine, manifest)
            if e is self._heard:
                raise RefitError(f"{e}; {self._serves}" if self._serves else str(e)) from e
            if isinstance(e, QuadsError) or not isinstance(e, Exception):
                raise
            raise RefitError(
                f"push of policy version {manifest.policy_version} failed after {last}: {type(e).__name__}: {e}; "
                f"{self._serves or 'ask the engine for its status() to see what serves'}"
            ) from e
        finally:
            tensors.close()
        if fingerprint is not None and report.fingerprint != fingerprint:
            raise MismatchError(
                f"policy version {manifest.policy_version}: the engine serves weights with fingerprint "
                f"{report.fingerprint}, the trainer sent {fingerprint}; do not use its rollouts"
            )
        return report

    # -- what the ranks say to each other ----------------------------------------------------------------------------

    def _conclude(self, error: BaseException | None) -> BaseException | None:
        """Gather what this rank has not gathered, then hear whether all ranks have come here without an error, and with
        unchanged weights. A collective, once. Returns what is wrong: this rank's error, or one that tells of another's.
        """
        if isinstance(error, CollectiveError):
            self._lost = error
        if self._concluded or self._lost is not None:
            return error or self._lost or self._failed
        with uninterrupted():
            self._concluded = True
            try:
                self._stream.gather_rest()
                changed, unknown = self._changed()
                error = self._share(error or unknown)
                if error is None:
                    self._stream.check_all_unchanged(changed)
            except CollectiveError as e:
                self._lost = error = e
            except RefitError as e:  # on all ranks
                self._failed = error = e
            return error

    def _changed(self) -> tuple[str | None, Exception | None]:
        """(a weight that this rank has changed, why that cannot be told)."""
        try:
            return self._stream.changed(), None
        except Exception as e:
            return None, e

    def _agree_to_commit(self, error: BaseException | None) -> BaseException | None:
        """As `_conclude`; then hear whether the engines of all ranks are ready as well. A collective, once."""
        concluded = self._conclude(error)
        if self._asked or self._failed is not None or self._lost is not None:
            return concluded
        with uninterrupted():
            self._asked = True
            try:
                return self._share(concluded)
            except CollectiveError as e:
                self._lost = e
                return e

    def _share(self, error: BaseException | None) -> BaseException | None:
        """This rank's error, or one that tells of another's. A collective."""
        outcome = self._ranks.agree(error, "the push", RefitError)
        self._failed = outcome
        if outcome is not error:
            self._heard = outcome
        return outcome

    def _settle(self, report: RefitReport | None, error: BaseException | None) -> RefitReport | None:
        """Hear how all ranks have ended; returns the report, or raises on all of them. A collective.

        error: this rank's own, or None.
        """
        said = None if error is None else f"{type(error).__name__}: {error}"
        try:
            endings = self._ranks.gather(_Ending(said, self._heard is not None, self._serves, report))
        except CollectiveError as e:
            if error is not None:
                raise error from None
            done = "" if report is None else f"policy version {report.policy_version} was committed and serves, but "
            raise CollectiveError(f"{done}{e}") from e
        failed = {rank: ending for rank, ending in enumerate(endings) if ending.error is not None}
        if not failed:
            return next((ending.report for ending in endings if ending.report is not None), None)
        rank, cause = next(((r, e) for r, e in failed.items() if not e.heard), next(iter(failed.items())))
        committed = {r: e.report.policy_version for r, e in enumerate(endings) if e.report is not None}
        there = [f"policy version {version} was committed and serves on rank {r}" for r, version in committed.items()]
        if error is not None and not (there and isinstance(error, Exception)):
            raise error
        text = f"the push failed on rank {rank}: {cause.error}" if error is None else f"{type(error).__name__}: {error}"
        if error is None and not says_what_serves(text):
            there += dict.fromkeys(ending.serves for ending in endings if ending.serves)
        raise RefitError("; ".join([text, *there])) from error


def _abort(engine: RolloutEngine, cause: BaseException) -> None:
    try:
        engine.abort()
    except Exception as e:
        raise RefitError(
            f"the push failed ({cause}) and so did the engine's abort ({e}); restart the engine, its weights are "
            f"in an unknown state"
        ) from cause


def _what_serves(engine: RolloutEngine, manifest: Manifest) -> str:
    """What an engine serves after a push that began and failed; empty if it has no `status`, or does not answer."""
    try:
        status = engine.status()  # type: ignore[attr-defined]
        if status.state is not EngineState.SERVING:
            return f"the engine does not serve: {status.reason}"
        if status.policy_version == manifest.policy_version:
            return f"policy version {manifest.policy_version} was committed and serves"
        return KEEP_SERVING
    except Exception:
        return ""


__all__ = ["Push"]
