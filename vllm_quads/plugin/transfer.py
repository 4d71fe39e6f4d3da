# SPDX-License-Identifier: Apache-2.0
"""The weight-transfer backend `quads`: vLLM's weight-update calls, carried out by a refit session in every worker.

vLLM makes one object per worker if `weight_transfer_config.backend` is "quads", which is the default of a quads engine
(`compat.default_weight_transfer`). What arrives is described in `vllm_quads.refit.remote`.

Nothing raises here while an update is open. vLLM's multi-process executor stops reading at the first rank whose call
fails and takes the other ranks' answers for those of the next call, and vLLM's worker forgets on which ranks an update
is open. So a failure is kept, later messages of that update are received and dropped, and the trainer asks: a worker
answers `collective_rpc("weight_transfer_engine", args=("status",))`, because this object is callable and vLLM resolves
names of methods by attribute. `finish_weight_update` raises a failure that nobody has asked for, on the last rank.

An update belongs to whoever has claimed it (`owner`; without a claim, whoever sends its first message); messages of
others are ignored, and their senders see in the status that they do not own it. Claims come first because a second
`start_weight_update` makes every worker raise, see above.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from vllm_quads.nvfp4 import QuadsError, RefitError
from vllm_quads.plugin import compat
from vllm_quads.plugin.metrics import RefitMetrics, bridge_file
from vllm_quads.plugin.policy import config_of, model_fingerprint, refuse_together
from vllm_quads.plugin.refit import session_of
from vllm_quads.plugin.refit_checks import check_parallel
from vllm_quads.plugin.transfer_checkpoint import checkpoint_manifest, checkpoint_state, checkpoint_tensors
from vllm_quads.plugin.transfer_receive import Receivers
from vllm_quads.refit import Manifest
from vllm_quads.refit.remote import PROTOCOL, state_to_text
from vllm_quads.refit.report import without_outcome

logger = init_logger("vllm.quads")


_CLAIM_SECONDS = 60.0
"""How long a claim holds; the update opens with the trainer's next message."""


@dataclass
class QuadsInitInfo(WeightTransferInitInfo):
    """`init_info` of `init_weight_transfer_engine`."""

    plane: str = "inline"
    info: dict[str, Any] = field(default_factory=dict)
    """What the plane needs, see `transfer_receive`."""


@dataclass
class QuadsUpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of `update_weights`: an operation and its arguments."""

    op: str
    arguments: dict[str, Any]


class QuadsTransferEngine(WeightTransferEngine):
    """One per worker."""

    init_info_cls = QuadsInitInfo
    update_info_cls = QuadsUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session = session_of(model)  # raises RefitError for a model that is not quantized by quads
        self._receivers = Receivers(config, vllm_config, device, self)
        self._instance = uuid.uuid4().hex
        self._plane_error: str | None = None
        self._gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        self._open = False
        self._claim: tuple[str, float] | None = None
        """Who will open the next update, and since when."""
        self._owner: str | None = None
        self._since = 0.0
        self._failure: str | None = None
        self._read = True
        self._version: int | None = None
        self._committed = False
        self._state: Any = None
        self._ends_before = 0
        self._asleep = False
        parallel = vllm_config.parallel_config
        self._rank, self._ranks = int(parallel.rank), int(parallel.world_size)
        self._metrics: RefitMetrics | None = None
        if self._rank == 0:
            engine = int(parallel.data_parallel_rank)
            self._metrics = RefitMetrics(engine, bridge_file(vllm_config, engine))
            self._session.observer = self._metrics

    # -- questions -----------------------------------------------------------------------------------------------

    def __call__(self, question: str, *args: Any) -> dict[str, Any]:
        """Answer a trainer: JSON types only; what goes wrong is in `error`, never raised."""
        answer: dict[str, Any] = {"protocol": PROTOCOL, "rank": self._rank}
        questions: dict[str, Callable[..., dict[str, Any]]] = {
            "status": self._status,
            "claim": self._claimed,
            "release": self._release,
            "describe": self._describe,
            "fingerprint": self._fingerprint,
            "before_sleep": self._before_sleep,
            "collect_statistics": self._collect_statistics,
            "compensation": self._compensation,
        }
        if question not in questions:
            return answer | {"error": f"knows no question {question!r}, only {sorted(questions)}"}
        try:
            return answer | questions[question](*args)
        except Exception as e:
            logger.exception("quads: %s failed", question)
            return answer | {"error": f"{question} failed: {_text(e)}"}

    def _status(self) -> dict[str, Any]:
        self._read = True
        return self._session.status().to_json() | {
            "open": self._open,
            "open_seconds": time.monotonic() - self._since if self._open else 0.0,
            "owner": self._owner,
            "failure": self._failure,
            "committed": self._committed,
            "instance": self._instance,
            "plane_error": self._plane_error,
            "asleep": self._asleep,
            "gpu": self._gpu,
        }

    def _claimed(self, session: str) -> dict[str, Any]:
        """Who may open the next update: whoever asks first, for a while, if none is open."""
        now = time.monotonic()
        if self._open:
            return {"claimed_by": self._owner}
        if self._claim is None or now - self._claim[1] > _CLAIM_SECONDS:
            self._claim = (session, now)
        return {"claimed_by": self._claim[0]}

    def _release(self, session: str | None) -> dict[str, Any]:
        """Forget a claim; None: anyone's."""
        if session is None or (self._claim is not None and self._claim[0] == session):
            self._claim = None
        return {}

    def _describe(self) -> dict[str, Any]:
        config = config_of(self.model)
        assert config.quantized is not None
        return {"manifest": Manifest(config.contract, config.quantized, {}, config.policy_version).to_json()}

    def _fingerprint(self) -> dict[str, Any]:
        return {"fingerprint": model_fingerprint(config_of(self.model))}

    def _before_sleep(self) -> dict[str, Any]:
        config = config_of(self.model)
        config.refusal = "the engine slept at level 2, which drops its weights"
        for runtime in config.runtimes.values():
            runtime.memory_lost()
        self._asleep = True
        return {}

    def _collect_statistics(self, on: bool) -> dict[str, Any]:
        config_of(self.model).collect(bool(on))
        return {}

    def _compensation(self) -> dict[str, Any]:
        if self._ranks > 1:
            raise RefitError(
                f"each of the {self._ranks} workers has the state of its shard; ask an engine with one worker"
            )
        return {"state": state_to_text(config_of(self.model).compensation())}

    # -- vLLM's life cycle -----------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: QuadsInitInfo) -> None:
        """Prepare a data plane; what goes wrong is in the status as `plane_error`."""
        self._plane_error = None
        try:
            self._receivers.init(init_info.plane, init_info.info)
        except Exception as e:
            logger.exception("quads: data plane %s could not be prepared", init_info.plane)
            self._plane_error = _text(e)

    def start_weight_update(self) -> None:
        """Open an update; the manifest comes with the first message."""
        self._end_session()  # of an update that vLLM has closed by itself
        self._open, self._since = True, time.monotonic()
        self._owner = None if self._claim is None else self._claim[0]
        self._claim, self._failure, self._read = None, None, True
        self._committed, self._version, self._state = False, None, None

    def parse_update_info(self, update_dict: dict[str, Any]) -> QuadsUpdateInfo:
        """Any message; one without a known operation becomes a failure of the update."""
        arguments = dict(update_dict)
        return QuadsUpdateInfo(str(arguments.pop("op", "")), arguments)

    def receive_weights(self, update_info: QuadsUpdateInfo) -> None:
        """One message of an update."""
        try:
            self._receive(update_info)
        except Exception as e:  # or vLLM would take the update for closed
            self._fail(_text(e), "transport")

    def _receive(self, update_info: QuadsUpdateInfo) -> None:
        operations: dict[str, tuple[Callable[..., None], str]] = {
            "begin": (self._begin, "manifest"),
            "load": (self._load, "tensor"),
            "checkpoint": (self._checkpoint, "manifest"),
            "commit": (self._commit, "verification"),
            "abort": (self._abort, "interrupted"),
        }
        if update_info.op not in operations:
            self._fail(
                f"update_weights: op is {update_info.op!r}, expected one of {sorted(operations)}; a quads engine is "
                f"refitted through vllm_quads.refit.as_engine or HttpEngine",
                "transport",
            )
            return
        arguments = dict(update_info.arguments)
        owner = arguments.pop("owner", None)
        if self._owner is None and update_info.op in ("begin", "checkpoint"):
            self._owner = owner
        if owner != self._owner:
            logger.warning("quads: ignored %s of a trainer that does not own the update", update_info.op)
            return
        operation, reason = operations[update_info.op]
        self._ends_before = self._ends()
        try:
            operation(**arguments)
        except Exception as e:
            self._fail(_text(e), reason)

    def finish_weight_update(self) -> None:
        """Close the update; what was not committed is given up."""
        try:
            self._ends_before = self._ends()
            if self._open and not self._committed and self._failure is None:
                self._fail("the update was finished without a commit", "interrupted")
            self._end_session()
            refuse_together(config_of(self.model))
        finally:
            self._open, self._owner = False, None
        unread = None if self._read else self._failure
        self._read = True
        if unread is not None and self._rank == self._ranks - 1:
            raise RefitError(unread)

    def shutdown(self) -> None:
        """Release what data planes hold."""
        self._receivers.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 has the sending side here, for its own trainers. Raises RefitError: QUADS' is `RolloutSync`."""
        raise RefitError("push with trainer_qat.RolloutSync, which sends a manifest first")

    # -- operations ------------------------------------------------------------------------------------------------

    def _begin(self, manifest: Mapping[str, Any]) -> None:
        self._begin_session(Manifest.from_json(manifest))

    def _begin_session(self, manifest: Manifest) -> None:
        check_parallel(self.parallel_config)
        if self._failure is None:
            self._session.begin(manifest)
            self._version = manifest.policy_version

    def _load(self, plane: str, **arguments: Any) -> None:
        self._receivers.receive(plane, arguments)

    def load_weights(self, weights: Any) -> None:
        """What vLLM's receiving engines call with the tensors that arrived."""
        if self._failure is not None:
            return  # received and dropped: with NCCL the trainer waits for every rank
        if self._version is None:
            self._fail("tensors came before a manifest", "transport")
            return
        try:
            self._session.receive(list(weights))
        except Exception as e:
            self._fail(_text(e), "tensor")

    def _checkpoint(self, path: str, policy_version: int, fingerprint: str | None = None) -> None:
        config = config_of(self.model)
        manifest = checkpoint_manifest(path, config, policy_version, fingerprint)
        state = checkpoint_state(path, config)
        self._begin_session(manifest)
        for tensors in checkpoint_tensors(path):
            self._session.receive(tensors)
        self._state = state

    def _commit(self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None) -> None:
        """On all ranks or on none. Two votes, which every rank comes to, whatever fails on it: whether all are well,
        and how it has ended."""
        values: tuple[dict[str, int] | None, dict[str, int] | None] = (None, None)
        try:
            if self._version is None:
                raise RefitError("commit came before a manifest")
            values = _integers(digests), _integers(plain)
        except Exception as e:
            self._fail(_text(e), "verification")
        failures = compat.gather(self._failure)
        first = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
        if first is not None:
            if self._failure is None:
                self._fail(f"rank {first[0]}: {first[1]}", "verification")
            return
        error: BaseException | None = None
        try:
            self._session.commit(*values, self._state)
        except BaseException as e:
            error = e
            self._fail(_text(e), "verification")
        outcome = self._session.settle(None if error is None else self._failure)
        if outcome is not None:
            self._failure = outcome if self._failure is None else f"{without_outcome(self._failure)}; {outcome}"
            self._read = False
            logger.error("quads: %s", outcome)
        if self._failure is None:
            self._committed, self._asleep = True, False
        self._version = None
        if error is not None and not isinstance(error, Exception):
            raise error

    def _abort(self) -> None:
        if self._committed:
            return  # what serves stays
        if self._failure is None:
            self._failure = "the trainer gave the update up"
        self._end_session()

    # -- failures --------------------------------------------------------------------------------------------------

    def _fail(self, text: str, reason: str) -> None:
        """Remember the first failure of an update; the weights that served before serve on, or none do."""
        if self._failure is not None:
            return
        self._failure, self._read = text, False
        self._end_session()
        logger.error("quads: refit refused: %s", text)
        if self._metrics is not None and self._ends() == self._ends_before:  # the session has not told of it itself
            try:
                self._metrics.ended("refused", reason)
            except Exception:
                logger.exception("quads: the end of a refit could not be reported")

    def _ends(self) -> int:
        """How many refits of the session have ended."""
        return sum(asdict(self._session.counters).values())

    def _end_session(self) -> None:
        if self._version is not None:
            self._version = None
            self._session.abort()


def _integers(digests: Mapping[str, Any] | None) -> dict[str, int] | None:
    return None if digests is None else {name: int(value) for name, value in digests.items()}


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, QuadsError) else f"{type(error).__name__}: {error}"


__all__ = ["QuadsInitInfo", "QuadsTransferEngine", "QuadsUpdateInfo"]
