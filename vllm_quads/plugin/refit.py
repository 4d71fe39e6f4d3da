# SPDX-License-Identifier: Apache-2.0
"""A refit inside of one rank: validated first, installed layer by layer as it arrives, verified, or undone.

    session = session_of(model)
    session.begin(manifest)
    session.receive(tensors)        # whole tensors, in any grouping
    report = session.commit()       # on every rank
    session.abort()                 # on every rank, when one has failed

Nothing here knows how tensors travel. A unit (see `units`) is installed in place when its last tensor has arrived, so
memory beside the model is that of one unit and of what the sender holds. From the first installed unit to the end no
forward pass runs (`require_servable`). A refit ends in one of three ways: the new weights serve; the previous weights
serve, with the fingerprint that they had; or the engine refuses to serve until a complete refit succeeds.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from vllm_quads.compensation import CompensationState
from vllm_quads.kernels.tensors import TensorDigests
from vllm_quads.nvfp4 import QuadsError, RefitError, unit_fingerprint
from vllm_quads.plugin import compat
from vllm_quads.plugin.arrivals import Arrivals
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.digests import DigestTable, added
from vllm_quads.plugin.guard import watch
from vllm_quads.plugin.installing import Installer
from vllm_quads.plugin.inventory import Inventory
from vllm_quads.plugin.open_refit import OpenRefit
from vllm_quads.plugin.phases import PhaseTimer
from vllm_quads.plugin.policy import config_of, end_together, refresh_compensation
from vllm_quads.plugin.refit_checks import compare_digests, compare_plain, compare_ranks, planned, require_undisturbed
from vllm_quads.plugin.streams import current_stream, ordered
from vllm_quads.plugin.undo import UndoLog
from vllm_quads.refit import EngineState, Manifest, RefitCounters, RefitReport, RefitStatus, Rollback
from vllm_quads.refit.report import KEEP_SERVING, REFUSES, STILL_REFUSES

logger = init_logger("vllm.quads")
_ARRIVING = "tensors of this refit are still being received; let load return first"
# Not on the config: vLLM's reload metadata reaches it from parameters, and would keep the model alive for ever.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, RefitSession] = weakref.WeakKeyDictionary()


def session_of(model: nn.Module) -> RefitSession:
    """The refit session of a loaded model of this rank: one per engine, made at the first call."""
    if model not in _SESSIONS:
        _SESSIONS[model] = RefitSession(model, config_of(model))
    return _SESSIONS[model]


class RefitObserver(Protocol):
    """Who wants to know how refits end, such as metrics."""

    def committed(self, report: RefitReport) -> None: ...

    def ended(self, outcome: str, reason: str) -> None: ...


class RefitSession:
    """All refits of one rank, one after another. Methods raise RefitError; after an error the refit is over."""

    def __init__(self, model: Any, config: QuadsConfig) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self._inventory = Inventory(model, config)
        self._device = next(model.parameters()).device
        self._table = DigestTable(self._inventory.units, self._device)
        self._installer = Installer(self._model, config, self._inventory, self._device)
        self._open: OpenRefit | None = None
        self._undo = UndoLog()
        self._known: dict[str, tuple[int, int]] = {}
        """Unit -> (version of its loader, digest): what need not be computed again."""
        self._failed = ""
        self._report: RefitReport | None = None
        self.counters = RefitCounters()
        self.observer: RefitObserver | None = None
        """Told how each refit ends."""
        self._stage = "manifest"
        watch(model, config)

    # -- the protocol --------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        """Validate everything that can be known before a byte moves.

        Raises RefitError naming the first difference in contract, set, names, shapes, dtypes, version or sites.
        """
        if self._open is not None:
            raise RefitError("a refit is already under way; commit or abort it first")
        self._failed = ""
        try:
            self._open = self._prepared(manifest)
        except BaseException as e:
            self.counters.refused += 1
            self._tell("refused", "manifest")
            if isinstance(e, QuadsError) or not isinstance(e, Exception):
                raise
            raise RefitError(f"the refit could not be prepared ({type(e).__name__}: {e}); nothing has changed") from e

    @torch.no_grad()
    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors, on any device, and install every layer that they complete.

        On a GPU, work is ordered with the current stream, and the sender's memory may be reused in that order. Raises
        RefitError for a tensor that the manifest does not promise or that is damaged; then the refit is over.
        """
        refit = self._require_open()
        self._stage = "tensor"
        if refit.receiving:
            raise self._ended(RefitError(_ARRIVING))
        refit.receiving = True
        try:
            with ordered(refit.stream):
                self._installer.receive(refit, tensors)
        except BaseException as e:
            if refit.ended:  # what is open now, if anything, is another refit
                raise
            raise self._ended(e) from e
        finally:
            refit.receiving = False

    @torch.no_grad()
    def commit(
        self,
        digests: Mapping[str, int] | None = None,
        plain: Mapping[str, int] | None = None,
        compensation: CompensationState | None = None,
    ) -> RefitReport:
        """Verify, over all ranks, and serve the new weights; or end as after any failure. A collective of all ranks.

        digests: unit name -> digest, as the trainer computed them; compared beside the manifest's fingerprint.
        plain: the same of every tensor that is not quantized, as it was sent; compared with what this rank got.
        compensation: state that serves with the new weights; None chooses from statistics, if any were gathered.
        """
        refit, failed, own = self._open, self._failed, None
        self._stage = "verification"
        error: BaseException | None = None
        seconds: dict[str, float] = {}
        arrived: dict[str, int] | None = None
        try:
            if refit is None:
                raise RefitError(failed or "no refit is under way; call begin(manifest) first")
            if refit.receiving:
                raise RefitError(_ARRIVING)
            with ordered(refit.stream):
                self._finish_installing(refit, compensation)
                with refit.timer.phase("verify"):
                    own = self._table.read(refit.digests)
                    arrived = None if refit.plain is None else refit.plain.read()
                seconds = refit.timer.seconds()
            compare_plain(arrived, plain)
        except BaseException as e:  # also an interrupt: the other ranks are to hear of it
            error = e
        message = None if error is None else f"{type(error).__name__}: {error}"
        try:
            outcomes = compat.gather((message, own, seconds, arrived))
            if error is not None:
                raise error
            other = next((f"{rank}: {m}" for rank, (m, *_) in enumerate(outcomes) if m is not None), None)
            if other is not None:
                raise RefitError(f"the refit failed on rank {other}")
            assert refit is not None
            totals = added([o for _, o, *_ in outcomes if o is not None])
            compare_digests(refit.manifest, totals, digests)
            compare_ranks([got for *_, got in outcomes])
        except BaseException as e:
            if refit is None:
                raise
            raise self._ended(e) from e
        slowest = {p: max(s.get(p, 0.0) for _, _, s, _ in outcomes) for _, _, own_s, _ in outcomes for p in own_s}
        try:
            return self._committed(refit, own or {}, totals, slowest, (digests is not None, plain is not None))
        except BaseException as e:
            if self._open is None and self._config.refusal is not None:  # too late to go back
                version = refit.manifest.policy_version
                self._config.refusal = f"a refit to policy version {version} failed as it was committed; {REFUSES}"
            raise self._ended(e) from e

    def settle(self, error: str | None) -> str | None:
        """Hear how the commit has ended on all ranks: see `policy.end_together`. A collective.

        error: why this rank has not committed, or None. Returns why it must not serve what it could, or None.
        """
        try:
            outcome = end_together(self._config, error)
        except BaseException as e:
            if error is None:  # it cannot be known any more whether the others have committed
                self._config.refusal = f"the other ranks did not say whether they have committed ({type(e).__name__})"
            raise
        if outcome is not None:
            self.counters.broken += 1
            self._tell("broken", "verification")
        return outcome

    def abort(self) -> None:
        """End the refit that is under way, if any: as after a failure."""
        self.fail(RefitError("the refit was aborted"))

    def fail(self, error: RefitError) -> BaseException:
        """End the refit that is under way, if any, for a reason that was found outside; returns what to raise."""
        self._stage = "interrupted"
        return self._ended(error)

    def status(self) -> RefitStatus:
        """Whether this rank may serve, and how refits have ended."""
        config = self._config
        state = EngineState.SERVING
        if config.refusal is not None:
            open_and_written = self._open is not None and self._open.touched
            state = EngineState.REFITTING if open_and_written else EngineState.REFUSING
        return RefitStatus(state, config.refusal or "", config.policy_version, self.counters, self._report)

    # -- begin ---------------------------------------------------------------------------------------------------

    def _prepared(self, manifest: Manifest) -> OpenRefit:
        timer = PhaseTimer(self._device)
        start = time.perf_counter()
        plan = planned(manifest, self._config, self._inventory)
        self._undo.clear()  # whatever an interrupt has left
        for runtime in self._config.runtimes.values():
            runtime.hand_over()  # from here on weights do not move
        waiting: dict[str, int] = {}
        for slot in plan.slots.values():
            waiting[slot.unit.name] = waiting.get(slot.unit.name, 0) + 1
        units = {u.name: u for u in self._inventory.units}
        units_left: dict[str, int] = {}
        for unit in units.values():
            units_left[unit.key] = units_left.get(unit.key, 0) + 1
        keeps = manifest.rollback is Rollback.HOST
        validated = time.perf_counter()
        if keeps:
            self._undo.reserve(self._written())
        reserved = time.perf_counter()
        digests = self._table.empty()
        status = torch.zeros(len(units), dtype=torch.int32, device=self._device)
        refit = OpenRefit(
            manifest,
            plan,
            timer,
            arrivals={name: Arrivals(units[name], n, self._device) for name, n in waiting.items()},
            outstanding=set(manifest.tensors),
            units_left=units_left,
            before=self._digests() if keeps else {},
            reloads=self._config.reloads.count,
            versions={k: r.loader.version for k, r in self._config.runtimes.items()},
            partial=[k for k, r in self._config.runtimes.items() if r.loader.is_partial()],
            serving_before=self._config.refusal,
            undo=self._undo if keeps else None,
            digests=digests,
            receipts=self._table.receipts(digests, status),
            status=status,
            stream=current_stream(self._device),
            plain=TensorDigests() if manifest.verify else None,
        )
        timer.add("validate", time.perf_counter() - reserved + validated - start)
        timer.add("undo", reserved - validated)
        return refit

    def _written(self) -> Iterator[Tensor]:
        """Everything that a refit overwrites."""
        for unit in self._inventory.units:
            yield from unit.storages()
        for parameter in {id(p): p for p in self._inventory.owners.values()}.values():
            yield parameter.data

    def _digests(self) -> dict[str, int]:
        """Digests of this rank's units, computed only where weights have changed since the last time."""
        stale = [
            unit
            for unit in self._inventory.units
            if self._known.get(unit.name, (None, 0))[0] != unit.runtime.loader.version
        ]
        fresh = self._table.of_what_serves(stale) if stale else {}
        for unit in stale:
            self._known[unit.name] = (unit.runtime.loader.version, fresh[unit.name])
        return {name: digest for name, (_, digest) in self._known.items()}

    def _require_open(self) -> OpenRefit:
        if self._open is None:
            raise RefitError(self._failed or "no refit is under way; call begin(manifest) first")
        return self._open

    # -- commit --------------------------------------------------------------------------------------------------

    def _finish_installing(self, refit: OpenRefit, compensation: CompensationState | None) -> None:
        if refit.outstanding:
            missing = next(n for n in refit.manifest.tensors if n in refit.outstanding)
            raise RefitError(f"{missing}: was promised by the manifest but never sent")
        require_undisturbed(refit, self._config)
        self._inventory.watch_written(refit.status, refit.flags)
        refit.flags.check()
        self._absorb()
        sensitivities = dict(refit.manifest.compensation)
        gathered = any(runtime.statistics for runtime in self._config.runtimes.values())
        if not gathered and not sensitivities and compensation is None:
            return
        with refit.timer.phase("derive"):
            refit.compensation = self._config.compensation()
            if compensation is not None:
                self._config.set_compensation(compensation)
                return
            refresh_compensation(self._config, sensitivities)
            if sensitivities:
                self._config.sensitivities = sensitivities

    def _absorb(self) -> None:
        """Weights that vLLM derives from others follow them."""
        model = self._model()
        if model is not None:
            compat.absorb_latent_attention(model)

    def _committed(
        self,
        refit: OpenRefit,
        own: Mapping[str, int],
        totals: Mapping[str, int],
        seconds: Mapping[str, float],
        compared: tuple[bool, bool],
    ) -> RefitReport:
        """compared: whether digests came of the units, and of the rest."""
        config, manifest = self._config, refit.manifest
        for unit in self._inventory.units:
            self._known[unit.name] = (unit.runtime.loader.version, own[unit.name])
        for runtime in config.runtimes.values():
            runtime.reset_statistics()
        kinds = sorted(refit.kinds)
        quantized = compared[0] or manifest.fingerprint is not None
        report = RefitReport(
            policy_version=manifest.policy_version,
            fingerprint=unit_fingerprint(totals),
            tensors=len(manifest.tensors),
            bytes=refit.bytes,
            seconds=seconds,
            digests=totals,
            payload=kinds[0] if len(kinds) == 1 else "mixed",
            rollback=manifest.rollback,
            verified=quantized and (compared[1] or not refit.plan.plain),
            fingerprint_verified=quantized,
        )
        self._open = None
        self._undo.clear()
        config.policy_version = manifest.policy_version
        config.refusal = None
        self.counters.committed += 1
        self._report = report
        self._notify(lambda observer: observer.committed(report))
        return report

    # -- failure -------------------------------------------------------------------------------------------------

    def _tell(self, outcome: str, reason: str) -> None:
        self._notify(lambda observer: observer.ended(outcome, reason))

    def _notify(self, tell: Callable[[RefitObserver], None]) -> None:
        """A metric that cannot be written decides nothing about the weights."""
        if self.observer is None:
            return
        try:
            tell(self.observer)
        except Exception:
            logger.exception("quads: the end of a refit could not be reported")

    def _ended(self, error: BaseException) -> BaseException:
        """End the open refit after an error; returns what to raise."""
        refit, self._open = self._open, None
        if refit is None:
            return error
        broken = self.counters.broken
        text = str(error)
        if not isinstance(error, QuadsError):
            text = f"refit failed after {refit.last} ({type(error).__name__}: {error})"
        with refit.lock:  # not amid a write of the thread that receives
            refit.ended = f"the refit has failed before: {text}"
            message = f"{text}; {self._undone(refit)}"
            self._failed = refit.ended = f"the refit has failed before: {message}"
        self._tell("rolled_back" if self.counters.broken == broken else "broken", self._stage)
        if not isinstance(error, Exception):
            return error  # an interrupt stays an interrupt
        return RefitError(message)

    def _undone(self, refit: OpenRefit) -> str:
        """Go back if that is possible; returns how the engine stands now."""
        config = self._config
        if not refit.touched:
            self.counters.rolled_back += 1
            return self._as_before(refit)
        reason = f"a refit to policy version {refit.manifest.policy_version} failed"
        if refit.undo is not None:
            try:
                with ordered(refit.stream):
                    self._restore(refit, refit.undo)
                config.refusal = refit.serving_before
                self.counters.rolled_back += 1
            except BaseException as e:
                config.refusal = f"{reason}, and so did its rollback ({type(e).__name__}: {e}); {REFUSES}"
                self.counters.broken += 1
                if not isinstance(e, Exception):
                    raise
                return config.refusal
            else:
                return self._as_before(refit)
            finally:
                with contextlib.suppress(Exception):
                    refit.undo.clear()
        config.refusal = f"{reason}; {REFUSES}"
        self.counters.broken += 1
        for runtime in config.runtimes.values():
            runtime.loader.forget_partial()
        self._recall(refit)
        return REFUSES

    @staticmethod
    def _as_before(refit: OpenRefit) -> str:
        return KEEP_SERVING if refit.serving_before is None else f"{STILL_REFUSES}: {refit.serving_before}"

    def _recall(self, refit: OpenRefit) -> None:
        """What is not part of the weights, and what a later push may leave as it is: as before."""
        for key, kept in refit.loaders.items():
            self._config.runtimes[key].loader.recall(kept)
        if refit.compensation is not None:
            self._config.set_compensation(refit.compensation)

    @torch.no_grad()
    def _restore(self, refit: OpenRefit, undo: UndoLog) -> None:
        config = self._config
        require_undisturbed(refit, config)  # or what is restored would meet what was loaded
        undo.restore()
        self._recall(refit)
        for runtime in config.runtimes.values():
            runtime.settle_for_graphs()
        self._absorb()
        if refit.partial:
            raise RefitError(f"{refit.partial[0]} held half-loaded weights before")
        now = self._digests()
        wrong = next((name for name, digest in refit.before.items() if now.get(name) != digest), None)
        if wrong is not None:
            raise RefitError(f"{wrong}: has other bytes than before")


__all__ = ["RefitObserver", "RefitSession", "session_of"]
