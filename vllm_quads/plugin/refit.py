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
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from vllm_quads.compensation import CompensationState, SiteState, refresh, uses_blocks
from vllm_quads.nvfp4 import (
    Centering,
    MismatchError,
    QuadsError,
    RefitError,
    Scheme,
    first_difference,
    unit_fingerprint,
)
from vllm_quads.plugin import compat
from vllm_quads.plugin.arrivals import Arrivals
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.digests import MODULO, DigestTable, added, over_ranks
from vllm_quads.plugin.flags import Flags
from vllm_quads.plugin.inventory import Inventory, Plan, TensorName
from vllm_quads.plugin.phases import PhaseTimer
from vllm_quads.plugin.runtime import ExpertsRuntime, LayerRuntime, LinearRuntime
from vllm_quads.plugin.undo import UndoLog
from vllm_quads.plugin.units import units_of
from vllm_quads.refit import EngineState, Manifest, RefitCounters, RefitReport, RefitStatus, Rollback, TensorSpec
from vllm_quads.refit.report import KEEP_SERVING, REFUSES, STILL_REFUSES

logger = init_logger("vllm.quads")
_FLUSH_BYTES = 256 * 1024**2
"""Weights that are not quantized are handed to vLLM's loaders whenever this much has arrived."""
# Not on the config: vLLM's reload metadata reaches it from parameters, and would keep the model alive for ever.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, RefitSession] = weakref.WeakKeyDictionary()


def config_of(model: nn.Module) -> QuadsConfig:
    """The quads config of a loaded model. Raises RefitError if the model was not loaded with quantization="quads"."""
    for module in model.modules():
        if isinstance(module, LayerRuntime):
            return cast(QuadsConfig, module.config)
    raise RefitError(
        'the engine was not started with quantization="quads"; start it with LLM(model, quantization="quads")'
    )


def session_of(model: nn.Module) -> RefitSession:
    """The refit session of a loaded model of this rank: one per engine, made at the first call."""
    if model not in _SESSIONS:
        _SESSIONS[model] = RefitSession(model, config_of(model))
    return _SESSIONS[model]


def model_digests(config: QuadsConfig) -> dict[str, int]:
    """Digest of every unit that is serving, added up over tensor-parallel ranks; all ranks have to ask."""
    units = [unit for key, runtime in config.runtimes.items() for unit in units_of(key, runtime)]
    device = next(b.device for r in config.runtimes.values() for b in r.buffers())
    return over_ranks(DigestTable(units, device).of_what_serves(units))


def model_fingerprint(config: QuadsConfig) -> str:
    """Fingerprint of the quantized weights that are serving: packed codes, block scales and global scales."""
    return unit_fingerprint(model_digests(config))


def refresh_compensation(config: QuadsConfig, sensitivities: Mapping[str, float] | None = None) -> int:
    """Choose channel sets and centring vectors anew from gathered statistics; returns the number of sites.

    Sites that have seen no token keep their state. Without `sensitivities`, those of the last time are used.
    """
    contract = config.contract
    wanted = uses_blocks(contract) or contract.activation.centering is not Centering.NONE
    if contract.scheme is not Scheme.W4A4 or not wanted:
        return 0
    sites = {}
    for runtime in config.runtimes.values():
        assert isinstance(runtime, (ExpertsRuntime, LinearRuntime))
        sites.update(runtime.site_inputs())
    if not sites:
        return 0
    chosen = refresh(sites, contract, dict(sensitivities or config.sensitivities))
    before = config.compensation()
    merged: dict[str, SiteState] = {**before.sites, **chosen.sites}
    config.set_compensation(type(before)(merged, chosen.sensitivities))
    return len(sites)


class RefitObserver(Protocol):
    """Who wants to know how refits end, such as metrics."""

    def committed(self, report: RefitReport) -> None: ...

    def ended(self, outcome: str, reason: str) -> None: ...


@dataclass
class _Refit:
    """A refit under way."""

    manifest: Manifest
    plan: Plan
    timer: PhaseTimer
    arrivals: dict[str, Arrivals]
    """Unit name -> what has arrived of it; removed when it is installed."""
    outstanding: set[str]
    """Tensors that have not been sent."""
    units_left: dict[str, int]
    """Layer -> units that are not installed yet."""
    before: dict[str, int]
    """Digests of the units of this rank before the refit."""
    partial: list[str]
    """Layers that held half-loaded weights before the refit."""
    serving_before: str | None
    """Why the engine did not serve before the refit, or None."""
    undo: UndoLog | None
    digests: Tensor
    """Of every matrix of this rank (`DigestTable`)."""
    flags: Flags = field(default_factory=Flags)
    loaders: dict[str, Any] = field(default_factory=dict)
    """Layer -> what its loader remembers of the time before."""
    compensation: CompensationState | None = None
    touched: bool = False
    """True once something was written."""
    bytes: int = 0
    last: str = "(nothing yet)"
    """Tensor that was received last."""
    kinds: set[str] = field(default_factory=set)
    """Forms in which quantized weights came."""


class RefitSession:
    """All refits of one rank, one after another. Methods raise RefitError; after an error the refit is over."""

    def __init__(self, model: Any, config: QuadsConfig) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self._inventory = Inventory(model, config)
        self._device = next(model.parameters()).device
        self._table = DigestTable(self._inventory.units, self._device)
        self._open: _Refit | None = None
        self._undo = UndoLog()
        self._known: dict[str, tuple[int, int]] = {}
        """Unit -> (version of its loader, digest): what need not be computed again."""
        self._failed = ""
        self._report: RefitReport | None = None
        self.counters = RefitCounters()
        self.observer: RefitObserver | None = None
        """Told how each refit ends."""
        self._stage = "manifest"

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

        On a GPU, work is enqueued on the current stream, and the sender's memory may be reused in that order. Raises
        RefitError for a tensor that the manifest does not promise or that is damaged; then the refit is over.
        """
        refit = self._require_open()
        self._stage = "tensor"
        try:
            plain: list[tuple[str, Tensor]] = []
            for name, tensor in self._timed(refit, tensors):
                self._check_promised(refit, name, tensor)
                refit.outstanding.discard(name)
                refit.bytes += tensor.nbytes
                refit.last = name
                slot = refit.plan.slots.get(name)
                if slot is None:
                    if name in refit.plan.plain:
                        with refit.timer.phase("transfer"):  # copied: the sender may overwrite it at once
                            plain.append((name, tensor.detach().to(self._device, copy=True)))
                        self._flag_plain(refit, *plain[-1])
                        if sum(t.nbytes for _, t in plain) >= _FLUSH_BYTES:
                            self._load_plain(refit, plain)
                            plain = []
                    continue
                arrivals = refit.arrivals[slot.unit.name]
                with refit.timer.phase("transfer"):
                    arrivals.accept(slot, tensor.detach())
                if arrivals.waiting == 0:
                    self._install(refit, refit.arrivals.pop(slot.unit.name))
                else:
                    with refit.timer.phase("transfer"):
                        arrivals.own()
            self._load_plain(refit, plain)
        except BaseException as e:
            raise self._ended(e) from e

    @torch.no_grad()
    def commit(
        self, digests: Mapping[str, int] | None = None, compensation: CompensationState | None = None
    ) -> RefitReport:
        """Verify, over all ranks, and serve the new weights; or end as after any failure. A collective of all ranks.

        digests: unit name -> digest, as the trainer computed them; compared beside the manifest's fingerprint.
        compensation: state that serves with the new weights; None chooses from statistics, if any were gathered.
        """
        refit, failed, own = self._open, self._failed, None
        self._stage = "verification"
        error: BaseException | None = None
        try:
            if refit is None:
                raise RefitError(failed or "no refit is under way; call begin(manifest) first")
            self._finish_installing(refit, compensation)
            own = self._table.read(refit.digests)
        except Exception as e:
            error = e
        except BaseException as e:
            raise self._ended(e) from e
        seconds = refit.timer.seconds() if refit is not None else {}
        message = None if error is None else f"{type(error).__name__}: {error}"
        try:
            outcomes = compat.gather((message, own, seconds))
            if error is not None:
                raise error
            other = next((m for m, _, _ in outcomes if m is not None), None)
            if other is not None:
                raise RefitError(f"the refit failed on another rank: {other}")
            assert refit is not None
            totals = added([o for _, o, _ in outcomes if o is not None])
            self._compare(refit.manifest, totals, digests)
        except BaseException as e:
            if refit is None:
                raise
            raise self._ended(e) from e
        slowest = {p: max(s.get(p, 0.0) for _, _, s in outcomes) for _, _, own_s in outcomes for p in own_s}
        return self._committed(refit, own or {}, totals, slowest, digests)

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

    def _prepared(self, manifest: Manifest) -> _Refit:
        timer = PhaseTimer(self._device)
        start = time.perf_counter()
        plan = self._validate(manifest)
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
        refit = _Refit(
            manifest,
            plan,
            timer,
            arrivals={name: Arrivals(units[name], n, self._device) for name, n in waiting.items()},
            outstanding=set(manifest.tensors),
            units_left=units_left,
            before=self._digests() if keeps else {},
            partial=[k for k, r in self._config.runtimes.items() if r.loader.is_partial()],
            serving_before=self._config.refusal,
            undo=self._undo if keeps else None,
            digests=self._table.empty(),
        )
        timer.add("validate", time.perf_counter() - start)
        return refit

    def _validate(self, manifest: Manifest) -> Plan:
        config = self._config
        difference = first_difference(manifest.contract, config.contract)
        if difference is not None:
            raise RefitError(f"trainer and rollout have different contracts: {difference} (trainer != rollout)")
        if manifest.quantized.shapes != self._inventory.quantized:
            assert config.quantized is not None
            try:
                manifest.quantized.require_equal(config.quantized)
            except MismatchError as e:
                raise RefitError(str(e)) from e
        if manifest.policy_version <= config.policy_version:
            raise RefitError(
                f"policy version {manifest.policy_version} is not newer than {config.policy_version}, which serves; "
                f"count on from the engine's version (leave policy_version out)"
            )
        plan = self._inventory.plan(manifest.tensors)
        for slot in plan.slots.values():
            if slot.field == "float":
                slot.unit.runtime.loader.frozen_amax(slot.unit.matrices)
        sites = {name for runtime in config.runtimes.values() for name in runtime.specs}
        for site, value in manifest.compensation.items():
            if not 0 <= value < math.inf:
                raise RefitError(f"sensitivities[{site!r}]: is {value}, expected a finite number of at least 0")
        unknown = sorted(set(manifest.compensation) - sites)
        if unknown:
            raise RefitError(
                f"sensitivities: {unknown[0]} is no quantized site of this engine (sites look like {min(sites)!r}); "
                f"take them from the model that is pushed"
            )
        return plan

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

    # -- receive -------------------------------------------------------------------------------------------------

    def _require_open(self) -> _Refit:
        if self._open is None:
            raise RefitError(self._failed or "no refit is under way; call begin(manifest) first")
        return self._open

    @staticmethod
    def _timed(refit: _Refit, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors; the time that the sender takes counts as transfer."""
        iterator = iter(tensors)
        while True:
            start = time.perf_counter()
            item = next(iterator, None)
            refit.timer.add("transfer", time.perf_counter() - start)
            if item is None:
                return
            yield item

    @staticmethod
    def _check_promised(refit: _Refit, name: str, tensor: Tensor) -> None:
        spec = refit.manifest.tensors.get(name)
        if spec is None:
            raise RefitError(f"{name}: is not in the manifest of this push")
        if name not in refit.outstanding:
            raise RefitError(f"{name}: was already sent in this push")
        if TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
            raise RefitError(
                f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, the manifest promised {spec.dtype} {spec.shape}"
            )

    def _flag_plain(self, refit: _Refit, name: str, tensor: Tensor) -> None:
        message = f"{name}: holds NaN or Inf; the trainer has diverged"
        refit.flags.add("bad", ~torch.isfinite(tensor).all(), message)

    def _install(self, refit: _Refit, arrivals: Arrivals) -> None:
        """Write one unit, whose tensors have all arrived."""
        unit, loader, timer = arrivals.unit, arrivals.unit.runtime.loader, refit.timer
        amax = None
        with timer.phase("validate"):
            if arrivals.is_float:
                amax = unit.shared_amax(arrivals.fields)
                refit.flags.add("amax", amax, f"{unit.name}: holds NaN or Inf; the trainer has diverged")
                frozen = loader.frozen_amax(unit.matrices)
                amax = amax if frozen is None else frozen.to(amax.device).reshape(amax.shape)
            else:
                unit.watch(arrivals.fields, refit.flags)
        self._before_writing(refit)
        with timer.phase("undo"):
            if unit.key not in refit.loaders:
                refit.loaders[unit.key] = loader.remember()
            if refit.undo is not None:
                for i, storage in enumerate(unit.storages()):
                    refit.undo.save(f"{unit.name}.{i}", storage)
        if amax is None:
            refit.kinds.add("packed")
            with timer.phase("install"):
                shards = unit.write_packed(arrivals.fields)
        else:
            refit.kinds.add("bf16")
            with timer.phase("quantize"):
                shards = unit.write_quantized(arrivals.fields, amax)
        unit.write_input_scales(arrivals.fields, arrivals.input_scales)
        with timer.phase("verify"):
            self._table.write(unit, refit.digests, shards)
        refit.units_left[unit.key] -= 1
        if refit.units_left[unit.key] == 0:
            loader.replaced()
            with timer.phase("derive"):
                unit.runtime.settle_for_graphs()

    def _load_plain(self, refit: _Refit, tensors: list[tuple[str, Tensor]]) -> None:
        """Let vLLM's own loaders write what is not quantized."""
        model = self._model()
        if not tensors or model is None:
            return
        self._before_writing(refit)
        with refit.timer.phase("undo"):
            if refit.undo is not None:
                for name, _ in tensors:
                    for key in refit.plan.plain[name]:
                        parameter = self._inventory.owners[key]
                        refit.undo.save(f"parameter {id(parameter)}", parameter.data)
        with refit.timer.phase("install"), self._device:
            names = (self._config.disk_name(str(TensorName.parse(name))) for name, _ in tensors)
            model.load_weights(zip(names, (t for _, t in tensors), strict=True))

    def _before_writing(self, refit: _Refit) -> None:
        """What is damaged must not be the first thing that is written. On a CPU, looking costs nothing: always."""
        if not refit.touched or self._device.type == "cpu":
            refit.flags.check()
        if not refit.touched:
            refit.touched = True
            self._config.refusal = (
                f"a refit to policy version {refit.manifest.policy_version} is under way; commit or abort it first"
            )

    # -- commit --------------------------------------------------------------------------------------------------

    def _finish_installing(self, refit: _Refit, compensation: CompensationState | None) -> None:
        if refit.outstanding:
            missing = next(n for n in refit.manifest.tensors if n in refit.outstanding)
            raise RefitError(f"{missing}: was promised by the manifest but never sent")
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

    @staticmethod
    def _compare(manifest: Manifest, own: Mapping[str, int], theirs: Mapping[str, int] | None) -> None:
        if theirs is not None:
            for unit in sorted({*own, *theirs}):
                if unit not in own or unit not in theirs or (own[unit] - theirs[unit]) % MODULO:
                    raise RefitError(
                        f"{unit}: the rollout arrived at other bytes than the trainer (digest "
                        f"{_hex(own.get(unit))} != {_hex(theirs.get(unit))}): they do not hold the same quantized "
                        f"weights"
                    )
        fingerprint = unit_fingerprint(own)
        if manifest.fingerprint is not None and fingerprint != manifest.fingerprint:
            raise RefitError(
                f"the rollout arrived at fingerprint {fingerprint}, the trainer at {manifest.fingerprint}: they do "
                f"not hold the same quantized weights"
            )

    def _committed(
        self,
        refit: _Refit,
        own: Mapping[str, int],
        totals: Mapping[str, int],
        seconds: Mapping[str, float],
        digests: Mapping[str, int] | None,
    ) -> RefitReport:
        config, manifest = self._config, refit.manifest
        for unit in self._inventory.units:
            self._known[unit.name] = (unit.runtime.loader.version, own[unit.name])
        for runtime in config.runtimes.values():
            runtime.reset_statistics()
        kinds = sorted(refit.kinds)
        report = RefitReport(
            policy_version=manifest.policy_version,
            fingerprint=unit_fingerprint(totals),
            tensors=len(manifest.tensors),
            bytes=refit.bytes,
            seconds=seconds,
            digests=totals,
            payload=kinds[0] if len(kinds) == 1 else "mixed",
            rollback=manifest.rollback,
            verified=digests is not None or manifest.fingerprint is not None,
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
        outcome = self._undone(refit)
        self._tell("rolled_back" if self.counters.broken == broken else "broken", self._stage)
        text = str(error)
        if not isinstance(error, QuadsError):
            text = f"refit failed after {refit.last} ({type(error).__name__}: {error})"
        message = f"{text}; {outcome}"
        self._failed = f"the refit has failed before: {message}"
        if not isinstance(error, Exception):
            return error  # an interrupt stays an interrupt
        return RefitError(message)

    def _undone(self, refit: _Refit) -> str:
        """Go back if that is possible; returns how the engine stands now."""
        config = self._config
        if not refit.touched:
            self.counters.rolled_back += 1
            return self._as_before(refit)
        reason = f"a refit to policy version {refit.manifest.policy_version} failed"
        if refit.undo is not None:
            try:
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
    def _as_before(refit: _Refit) -> str:
        return KEEP_SERVING if refit.serving_before is None else f"{STILL_REFUSES}: {refit.serving_before}"

    def _recall(self, refit: _Refit) -> None:
        """What is not part of the weights, and what a later push may leave as it is: as before."""
        for key, kept in refit.loaders.items():
            self._config.runtimes[key].loader.recall(kept)
        if refit.compensation is not None:
            self._config.set_compensation(refit.compensation)

    @torch.no_grad()
    def _restore(self, refit: _Refit, undo: UndoLog) -> None:
        config = self._config
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


def _hex(digest: int | None) -> str:
    return "none" if digest is None else f"{digest % MODULO:016x}"


__all__ = ["RefitSession", "config_of", "model_digests", "model_fingerprint", "refresh_compensation", "session_of"]
