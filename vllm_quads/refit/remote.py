# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in other processes, driven through vLLM's weight-update life cycle.

Two things vary and are objects of their own: `Control` carries small messages to the engine (a method call, an event
loop, HTTP), `DataPlane` carries tensors to its workers (CUDA IPC, NCCL, files, bytes). `RemoteEngine` is the protocol
between them, the same for all:

    claim                                           of two trainers one is let through
    start_weight_update                             vLLM opens the update
    update_weights {"op": "begin", manifest}        every worker validates, and knows its owner from now on
    pause (drain, freeze or abort)                  no request runs while weights change
    update_weights {"op": "load", ...}  (buckets)   every worker installs
    reset_prefix_cache                              its blocks belong to the old weights
    update_weights {"op": "commit"}                 all workers agree, verify and switch; or none does
    weight version, resume, finish_weight_update

Every message names its push (`owner`), and workers ignore those of any other: a trainer that was given up for dead, or
that came second, neither writes, pauses nor resumes. Pausing and resuming happen while the update is open for the same
reason.

Workers do not raise: vLLM's multi-process executor stops reading answers at the first rank that fails, and hands the
rest to the next call. They remember what went wrong, and answer when asked (`weight_transfer_engine`, "status").
"""

from __future__ import annotations

import base64
import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_quads.compensation import STATE_FILE, CompensationState
from vllm_quads.nvfp4 import Contract, QuantizedSet, RefitError
from vllm_quads.refit.manifest import Manifest
from vllm_quads.refit.report import KEEP_SERVING, RefitReport, RefitStatus, says_what_serves
from vllm_quads.refit.transport import WORKER, Control, DataPlane

PROTOCOL = 4
"""Version of the messages between `RemoteEngine` and the workers; both sides must have the same."""


class InFlight(str, Enum):
    """What happens to requests that are running when a refit begins (vLLM's pause modes)."""

    WAIT = "wait"
    """They finish with the old weights; new ones wait for the new weights."""
    KEEP = "keep"
    """They freeze, and go on with the new weights; their key/value cache is computed anew."""
    ABORT = "abort"
    """They end at once, with what they have."""


_REFUSES = "the engine refuses to serve until a refit succeeds"


@dataclass(frozen=True)
class _Owned:
    """Messages of one push."""

    control: Control
    owner: str | None

    def update(self, info: Mapping[str, Any]) -> None:
        self.control.update({**info, "owner": self.owner})


class RemoteEngine:
    """`vllm_quads.refit.RolloutEngine` for an engine in other processes."""

    def __init__(self, control: Control, plane: DataPlane, in_flight: InFlight | str = InFlight.WAIT) -> None:
        """control, plane: see the module; in_flight: what happens to running requests."""
        self._control = control
        self._plane = plane
        try:
            self._in_flight = InFlight(in_flight)
        except ValueError:
            raise RefitError(f"in_flight: is {in_flight!r}, expected one of {[m.value for m in InFlight]}") from None
        self._session: str | None = None
        self._before = 0
        """Policy version when the session began."""
        self._instance = ""
        """Of the engine that the session is with."""
        self._started = False
        """True once the session has opened an update."""
        self._resume = False
        """True while this object owes a resume."""
        self._asleep = 0
        """Level at which the engine sleeps."""
        self._weights_awake = True
        self._seconds: dict[str, float] = {}

    # -- reading -------------------------------------------------------------------------------------------------

    def contract(self) -> Contract:
        """The contract that is serving."""
        return self._describe().contract

    def quantized(self) -> QuantizedSet:
        """The quantized weights, by canonical name."""
        return self._describe().quantized

    def fingerprint(self) -> str:
        """Fingerprint of the quantized weights that are serving, computed now from their bytes on every worker."""
        return str(self._ask("fingerprint")[0]["fingerprint"])

    def policy_version(self) -> int:
        """Version given by the last committed push; 0 before the first."""
        return self.status().policy_version

    def status(self) -> RefitStatus:
        """Whether the engine may serve, and how its refits have ended."""
        return RefitStatus.from_json(self._status())

    def _status(self) -> dict[str, Any]:
        """The workers' statuses in one: beside those of `RefitStatus` also `open`, `owner` and `failure` of the update
        that is open, and `instance`, which changes when the engine is started anew."""
        statuses = self._ask("status")
        merged = dict(statuses[0])
        order = ("serving", "refitting", "refusing")
        worst = max(statuses, key=lambda s: order.index(s["state"]))
        merged["state"], merged["reason"] = worst["state"], worst["reason"]
        merged["committed"] = all(s.get("committed") for s in statuses)
        failed = next(((r, s["failure"]) for r, s in enumerate(statuses) if s["failure"]), None)
        if failed is not None:
            merged["failure"] = failed[1] if len(statuses) == 1 else f"rank {failed[0]}: {failed[1]}"
        versions = {s["policy_version"] for s in statuses}
        if len(versions) > 1:
            raise RefitError(f"{self._control.label}: its workers serve policy versions {sorted(versions)}; restart it")
        return merged

    def compensation(self) -> CompensationState:
        """Channel sets, centring vectors and sensitivities that are serving. Raises RefitError for a sharded engine."""
        return state_from_text(self._ask("compensation")[0]["state"])

    def collect_statistics(self, on: bool = True) -> None:
        """Start or stop gathering error statistics, from which every later push chooses compensation anew."""
        self._ask("collect_statistics", on)

    def _describe(self) -> Manifest:
        return Manifest.from_json(self._ask("describe")[0]["manifest"])

    def _ask(self, question: str, *arguments: Any) -> list[dict[str, Any]]:
        answers = self._control.rpc(WORKER, question, *arguments)
        if not answers:
            raise RefitError(f"{self._control.label}: none of its workers answered; ask again when it has started")
        for rank, answer in enumerate(answers):
            if not isinstance(answer, Mapping) or "protocol" not in answer:
                raise RefitError(
                    f"{self._control.label}: its worker {rank} does not answer as QUADS does ({answer!r}); start it "
                    f'with quantization="quads" and without another weight_transfer_config'
                )
            if answer["protocol"] != PROTOCOL:
                raise RefitError(
                    f"{self._control.label}: speaks version {answer['protocol']} of the refit protocol, this trainer "
                    f"{PROTOCOL}; install the same vllm-quads on both sides"
                )
            if answer.get("error"):
                raise RefitError(f"{self._control.label}: {answer['error']}")
        return [dict(a) for a in answers]

    # -- refit ---------------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        """Let every worker validate a push, then pause the engine. Raises RefitError, and then the engine goes on."""
        self._open({"op": "begin", "manifest": manifest.to_json()})

    def _open(self, message: Mapping[str, Any]) -> None:
        """Begin an update with its first message."""
        if self._session is not None:
            raise RefitError("a refit is already under way; commit or abort it first")
        start = time.perf_counter()
        status = self._status()
        if status["open"]:
            raise RefitError(
                f"{self._control.label}: another trainer's update is open since {status['open_seconds']:.0f} s; if "
                f"that trainer is dead, call recover()"
            )
        self._wake_weights(status)
        self._session, self._instance, self._started = uuid.uuid4().hex, str(status["instance"]), False
        self._before = int(status["policy_version"])
        with self._ending_on_failure():
            self._plane.connect(self._control, self._instance)
            self._claim()
            self._start_update()
            self._started = True
            self._update(message)
            self._pause(refusing=status["state"] == "refusing")
        self._seconds = {"client_begin": time.perf_counter() - start, "client_send": 0.0}

    def _claim(self) -> None:
        """Be the one that opens the next update. Raises RefitError if another trainer is."""
        claims = {answer["claimed_by"] for answer in self._ask("claim", self._session)}
        if claims != {self._session}:
            raise RefitError(
                f"{self._control.label}: another trainer has just begun an update; push again when it is through, or, "
                f"if that trainer is dead, call recover()"
            )

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors; one bucket travels while the next is made. Raises RefitError, and then the push is aborted."""
        self._require_open()
        start = time.perf_counter()
        with self._ending_on_failure(), ThreadPoolExecutor(1, thread_name_prefix="quads-refit") as sender:
            under_way: Future[None] | None = None
            try:
                for bucket in _buckets(tensors, self._plane.bucket_bytes):
                    if bucket[0][1].is_cuda:  # the sender uses streams of its own
                        torch.cuda.current_stream(bucket[0][1].device).synchronize()
                    if under_way is not None:
                        under_way.result()
                    under_way = sender.submit(self._send, bucket)
                if under_way is not None:
                    under_way.result()
            except BaseException:
                if under_way is not None:
                    with contextlib.suppress(Exception):
                        under_way.result()
                raise
        self._seconds["client_send"] += time.perf_counter() - start

    def _send(self, bucket: list[tuple[str, Tensor]]) -> None:
        self._plane.send(_Owned(self._control, self._session), bucket)
        self._check()

    def commit(self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None) -> RefitReport:
        """Let all workers switch to the new weights, or raise RefitError and say what serves."""
        self._require_open()
        start = time.perf_counter()
        message: dict[str, Any] = {"op": "commit"}
        for key, values in (("digests", digests), ("plain", plain)):
            if values is not None:
                message[key] = {name: int(value) for name, value in values.items()}
        with self._ending_on_failure():
            # vLLM does not do this by itself. Before the commit, so that new weights never meet old blocks.
            if not self._control.reset_prefix_cache(self._in_flight is InFlight.KEEP):
                raise RefitError(f"{self._control.label}: vLLM refused to reset its prefix cache")
            report = RefitReport.from_json(self._commit(message)["report"])
        try:
            self._release(report.policy_version)
        except RefitError as e:
            raise RefitError(
                f"{e}; policy version {report.policy_version} was committed, but the engine may still be paused: "
                f"call recover()"
            ) from e
        return report.with_seconds(**self._seconds, client_commit=time.perf_counter() - start)

    def _commit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Commit; returns the status. An answer that is lost on the way is no failure."""
        try:
            return self._update(message)
        except RefitError as error:
            try:
                status = self._status()
            except RefitError:
                raise RefitError(f"{error}; the commit was under way: status() tells what serves") from error
            if not _has_committed(status, self._session):
                raise
            return status

    def _release(self, policy_version: int) -> None:
        """After a commit: requests run again, and the update is closed."""
        self._session = None
        self._control.set_weight_version(str(policy_version))
        self._go_on()
        self._control.finish()

    def abort(self) -> None:
        """Give the push up; the previous weights serve on. Raises RefitError if nothing serves any more.

        What has been committed, by a call that was interrupted while it waited for the answer, stays.
        """
        if self._session is not None:
            self._drop()

    def recover(self) -> None:
        """Give up the update that a dead trainer has left open, and let the engine go on.

        Raises RefitError if the engine holds no usable weights; push again then.
        """
        self._resume = self._control.can_pause and self._asleep == 0
        self._drop(force=True)

    def _drop(self, *, force: bool = False) -> str:
        """End the push (force: anyone's); returns what serves. Raises RefitError if nothing does."""
        mine, self._session = self._session, None
        if force or not self._started:
            with contextlib.suppress(RefitError):
                self._ask("release", None if force else mine)
        status = self._status()
        if _has_committed(status, mine):
            self._release(int(status["policy_version"]))
            return f"policy version {status['policy_version']} was committed and serves"
        restarted = not force and status["instance"] != self._instance
        is_open = bool(status["open"])
        if restarted or (is_open and not force and not (self._started and status["owner"] in (None, mine))):
            self._resume = False  # not this trainer's to end or to resume
            return f"{self._control.label}: was started anew" if restarted else "status() tells what serves"
        if is_open:
            self._abort_update(status["owner"])
            status = self._status()  # also tells the workers that their failure has been read
        refuses = status["state"] == "refusing"
        if not refuses:
            self._go_on()
        if is_open:
            self._control.finish()
        if refuses:
            raise RefitError(f"{self._control.label}: {_REFUSES} ({status['reason']}); it stays paused")
        if mine is not None and status["policy_version"] != self._before:  # and what failed came after
            return f"policy version {status['policy_version']} was committed and serves"
        return KEEP_SERVING

    def _start_update(self) -> None:
        """Open an update. After an exception in the end of one vLLM may take it for open, which workers have closed."""
        try:
            self._control.start()
        except RefitError:
            self._control.finish()
            self._control.start()

    def _abort_update(self, owner: str | None) -> None:
        """Abort the update that is open in the workers. After an exception or an interrupt in one of its calls vLLM
        takes it for closed; then it is opened once more, which ends what the workers had open."""
        try:
            _Owned(self._control, owner).update({"op": "abort"})
        except RefitError:
            self._control.start()
            _Owned(self._control, None).update({"op": "abort"})

    def _update(self, message: Mapping[str, Any]) -> dict[str, Any]:
        _Owned(self._control, self._session).update(message)
        return self._check()

    def _check(self) -> dict[str, Any]:
        """The workers' status. Raises RefitError with the reason of the first that has failed."""
        status = self._status()
        if status["owner"] != self._session:
            raise RefitError(f"{self._control.label}: this push is over, another trainer has ended it")
        if status["failure"] is not None:
            raise RefitError(str(status["failure"]))
        return status

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """End the push at the first error; a RefitError then says what serves."""
        try:
            yield
        except BaseException as error:
            try:
                outcome = self._drop()
            except Exception as e:
                outcome = str(e)
            if not isinstance(error, RefitError):
                raise
            text = str(error)
            if _REFUSES in outcome:  # one worker may have written nothing, where another one has
                text = text.replace(f"; {KEEP_SERVING}", "")
            if not says_what_serves(text):
                raise RefitError(f"{text}; {outcome}") from error
            raise

    def _require_open(self) -> None:
        if self._session is None:
            raise RefitError("no refit is under way; call begin(manifest) first")

    # -- requests ------------------------------------------------------------------------------------------------

    def _pause(self, *, refusing: bool) -> None:
        if not self._control.can_pause:
            self._control.require_idle()
        elif self._asleep:
            return  # vLLM has paused it
        elif self._control.is_paused():
            self._resume = self._resume or refusing  # paused for want of weights, by whomever
        else:
            try:
                self._control.pause(self._in_flight.value)
            except BaseException:
                with contextlib.suppress(RefitError):
                    self._control.resume()
                raise
            self._resume = True

    def _go_on(self) -> None:
        """Resume what `_pause` has stopped; wake the rest of an engine that was waiting for weights."""
        if self._asleep == 2:
            self._asleep = 0
            self._control.wake_up(["kv_cache"])
        elif self._resume:
            self._control.resume()
        self._resume = False

    def _wake_weights(self, status: Mapping[str, Any]) -> None:
        """Memory that is asleep cannot be written; another process may have sent the engine to sleep."""
        if self._asleep == 1:
            raise RefitError(f"{self._control.label}: is asleep; call wake_up() before a push")
        if status.get("asleep") and self._asleep == 0:
            self._asleep, self._weights_awake = 2, False
        if not self._weights_awake:
            self.wake_up()

    # -- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give the engine's GPU memory back while the trainer works.

        level 1: weights move to CPU memory. level 2: they are dropped; from then on the engine refuses to serve until
        the next push has committed. The engine must have been started with `enable_sleep_mode=True`; on a CPU vLLM
        ignores the call.
        """
        if level not in (1, 2):
            raise RefitError(f"level: is {level!r}, expected 1 (weights to CPU memory) or 2 (weights dropped)")
        if self._session is not None:
            raise RefitError("a refit is under way; commit or abort it before the engine sleeps")
        if level == 2:
            if self._control.can_pause:
                self._control.pause(InFlight.WAIT.value)  # a request that still ran would meet the refusal
            self._ask("before_sleep")
        self._control.sleep(level)
        self._asleep, self._weights_awake = level, False

    def wake_up(self) -> None:
        """Take the memory again. After level 2 only the weights' memory comes back; `push`, then requests run."""
        self._weights_awake = True
        if self._asleep == 2:
            self._control.wake_up(["weights"])
            return
        self._asleep = 0
        self._control.wake_up(None)

    def close(self) -> None:
        """Give the data plane's resources back."""
        self._plane.close()


def _has_committed(status: Mapping[str, Any], session: str | None) -> bool:
    return session is not None and status["owner"] == session and bool(status.get("committed"))


def state_to_text(state: CompensationState) -> str:
    """Compensation state as text that any message can carry."""
    with tempfile.TemporaryDirectory() as directory:
        return base64.b64encode(state.save(Path(directory)).read_bytes()).decode()


def state_from_text(text: str) -> CompensationState:
    """Inverse of `state_to_text`."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / STATE_FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(base64.b64decode(text))
        state = CompensationState.load(Path(directory))
    assert state is not None
    return state


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


__all__ = ["PROTOCOL", "WORKER", "Control", "DataPlane", "InFlight", "RemoteEngine"]
