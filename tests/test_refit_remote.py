# SPDX-License-Identifier: Apache-2.0
"""Engines in other processes: what is called in which order, and what happens when something fails."""

from __future__ import annotations

import gc
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_quads.nvfp4 import Contract, QuantizedSet, RefitError
from vllm_quads.refit import HttpEngine, Manifest, RefitReport, TensorSpec, as_engine
from vllm_quads.refit.client import HttpControl
from vllm_quads.refit.planes import DiskPlane, InlinePlane
from vllm_quads.refit.remote import PROTOCOL, InFlight, RemoteEngine

TENSORS = {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16), "b.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
MANIFEST = Manifest(
    Contract(), QuantizedSet({}), {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in TENSORS.items()}, 7
)


class Control:
    """Workers in memory, which follow the protocol and can be told to fail."""

    label = "engine"
    can_pause = True

    def __init__(self, ranks: int = 2) -> None:
        self.calls: list[str] = []
        self.claim: str | None = None
        self.paused = False
        self.protocol = PROTOCOL
        self.fail: tuple[str, int] | None = None
        """(operation, rank)"""
        self.broken = False
        self.cache_resets = True
        self.before_update: Callable[[Mapping[str, Any]], None] = lambda info: None
        """Called with every message; may raise."""
        self.after_update: Callable[[Mapping[str, Any]], None] = lambda info: None
        self.status = [
            {"state": "serving", "reason": "", "policy_version": 0, "failure": None, "owner": None, "open": False,
             "committed": False, "open_seconds": 0.0, "counters": {}, "instance": "x", "report": None,
             "protocol": PROTOCOL}
            for _ in range(ranks)
        ]  # fmt: skip

    def rpc(self, method: str, *args: Any) -> list[Any]:
        assert method == "weight_transfer_engine"
        question = args[0]
        owner = next((s["owner"] for s in self.status if s["open"]), None)
        if question == "claim" and self.claim is None and owner is None:
            self.claim = args[1]
        elif question == "release" and args[1] in (None, self.claim):
            self.claim = None
        return [dict(s, claimed_by=owner or self.claim, protocol=self.protocol) for s in self.status]

    def init(self, info: Mapping[str, Any]) -> None:
        self.calls.append("init")

    def start(self) -> None:
        if self.status[0]["open"]:
            raise RefitError("start_weight_update called while a weight update is already active")
        self.calls.append("start")
        for s in self.status:
            s.update(open=True, failure=None, owner=self.claim, committed=False)
        self.claim = None

    def update(self, info: Mapping[str, Any]) -> None:
        self.before_update(info)
        op = info["op"]
        self.calls.append(op)
        for rank, s in enumerate(self.status):
            if op == "begin" and s["owner"] is None:
                s["owner"] = info["owner"]
                json.dumps(info)
            if info["owner"] != s["owner"]:
                self.calls[-1] = f"ignored {op}"
                continue
            if (op, rank) == self.fail:
                s["failure"] = f"{op} went wrong"
                if self.broken:
                    s.update(state="refusing", reason="half of the weights are new")
            if op == "commit" and self.fail is None:
                s.update(policy_version=7, state="serving", reason="", committed=True)
                s["report"] = RefitReport(7, "f" * 16, 2, 10, {"install": 0.5}).to_json()
        self.after_update(info)

    def finish(self) -> None:
        self.calls.append("finish")
        for s in self.status:
            s.update(open=False, owner=None)

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused

    def require_idle(self) -> None:
        self.calls.append("require_idle")

    def reset_prefix_cache(self, running: bool) -> bool:
        self.calls.append(f"reset {running}")
        return self.cache_resets

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.paused = True

    def wake_up(self, tags: list[str] | None) -> None:
        self.calls.append(f"wake {tags}")
        self.paused = tags == ["weights"]


def push(engine: RemoteEngine) -> RefitReport:
    engine.begin(MANIFEST)
    engine.load(TENSORS.items())
    return engine.commit({"u": 2**63 + 5})


@pytest.mark.parametrize("mode", list(InFlight))
def test_a_push_pauses_switches_and_goes_on(mode: InFlight) -> None:
    """Requests are stopped before the first weight travels and run again when the new ones serve; the prefix cache is
    reset in between, of frozen requests too. The update stays open around all of it."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane(), mode)
    report = push(engine)
    running = mode is InFlight.KEEP
    assert control.calls == [
        "start", "begin", f"pause {mode.value}", "load", f"reset {running}", "commit", "version 7", "resume", "finish",
    ]  # fmt: skip
    assert report.policy_version == engine.policy_version() == 7
    assert set(report.seconds) == {"install", "client_begin", "client_send", "client_commit"}


def test_an_engine_that_was_paused_stays_paused() -> None:
    """Whoever paused the engine resumes it."""
    control = Control()
    control.paused = True
    push(RemoteEngine(control, InlinePlane()))
    assert control.paused
    assert "resume" not in control.calls


def test_large_payloads_travel_in_buckets() -> None:
    """A bucket is sent when the next tensor would not fit."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane(bucket_bytes=33))
    push(engine)
    assert control.calls.count("load") == 2


@pytest.mark.parametrize("where", [("begin", 1), ("load", 1), ("commit", 0)])
def test_a_failure_on_one_rank_aborts_on_all(where: tuple[str, int]) -> None:
    """One worker's failure is reported with its rank and reason, all workers abort, and requests run again."""
    control = Control()
    control.fail = where
    engine = RemoteEngine(control, InlinePlane())
    with pytest.raises(RefitError, match=rf"rank {where[1]}: {where[0]} went wrong; the previous weights keep serving"):
        push(engine)
    assert control.calls[-2:] == (["abort", "finish"] if where[0] == "begin" else ["resume", "finish"])
    assert not control.paused
    assert not any(s["open"] for s in control.status)
    control.fail = None
    assert push(engine).policy_version == 7


def test_an_engine_without_weights_stays_paused() -> None:
    """If a failure leaves no usable weights, requests do not run, and the error says so."""
    control = Control()
    control.fail, control.broken = ("load", 0), True
    engine = RemoteEngine(control, InlinePlane())
    with pytest.raises(RefitError, match=r"rank 0: load went wrong; .*refuses to serve until a refit succeeds"):
        push(engine)
    assert control.paused
    with pytest.raises(RefitError, match="refuses to serve"):
        engine.recover()
    assert control.paused
    control.fail = None
    push(RemoteEngine(control, InlinePlane()))  # a trainer that has been started anew
    assert not control.paused


def test_what_serves_is_what_all_workers_serve() -> None:
    """A worker that had written nothing keeps its weights; the error does not say so of an engine whose other worker
    has lost them."""
    control = Control()

    def half(info: Mapping[str, Any]) -> None:
        if info["op"] == "load":
            control.status[0]["failure"] = "a.weight: holds NaN or Inf; the previous weights keep serving"
            control.status[1].update(state="refusing", reason="half of the weights are new")

    control.after_update = half
    with pytest.raises(RefitError, match=r"rank 0: a.weight: holds NaN or Inf; .*refuses to serve") as caught:
        push(RemoteEngine(control, InlinePlane()))
    assert "keep serving" not in str(caught.value)


def test_another_trainers_update_is_left_alone_until_told() -> None:
    """A second trainer is refused and changes nothing; `recover` ends what a dead one has left open."""
    control = Control()
    RemoteEngine(control, InlinePlane()).begin(MANIFEST)
    before = list(control.calls)
    second = RemoteEngine(control, InlinePlane())
    with pytest.raises(RefitError, match=r"another trainer.*recover\(\)"):
        second.begin(MANIFEST)
    second.abort()
    assert control.calls == before
    second.recover()
    assert not control.paused
    assert push(second).policy_version == 7


def test_two_trainers_at_once() -> None:
    """Whoever comes second is refused, even if neither saw the other's update open, and changes nothing: the first
    one's requests stay paused until its own end."""
    control = Control()
    first, second = RemoteEngine(control, InlinePlane()), RemoteEngine(control, InlinePlane())
    closed = second._status()
    first.begin(MANIFEST)
    before = list(control.calls)
    statuses = iter([closed])
    with pytest.MonkeyPatch.context() as patch:
        original = second._status
        patch.setattr(second, "_status", lambda: next(statuses, None) or original())
        with pytest.raises(RefitError, match=r"has just begun an update.*; status\(\) tells what serves"):
            second.begin(MANIFEST)
    assert control.calls == before
    first.load(TENSORS.items())
    assert first.commit().policy_version == 7
    assert not control.paused


def test_vllm_is_never_asked_to_open_a_second_update() -> None:
    """It would fail on every rank, after which vLLM's executor mixes up the answers of its workers. A trainer that died
    between its claim and its update can be given up; one whose update did not open gives its claim back."""
    control = Control()
    control.claim = "a trainer that died"
    engine = RemoteEngine(control, InlinePlane())
    with pytest.raises(RefitError, match=r"another trainer has just begun.*recover\(\)"):
        engine.begin(MANIFEST)
    assert "start" not in control.calls
    engine.recover()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "start", lambda: _raise(RefitError("no answer within 300 s")))
        with pytest.raises(RefitError, match="no answer"):
            engine.begin(MANIFEST)
    assert control.claim is None
    assert push(engine).policy_version == 7


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("step", ["load", "commit", "abort"])
def test_a_trainer_that_was_given_up_writes_nothing(step: str) -> None:
    """A trainer that hung, and was taken for dead, finds out when it goes on; the push that replaced it is whole, and
    its requests stay paused until it ends."""
    control = Control()
    hung, other = RemoteEngine(control, InlinePlane()), RemoteEngine(control, InlinePlane())
    hung.begin(MANIFEST)
    other.recover()
    other.begin(MANIFEST)
    calls = {"load": lambda: hung.load(TENSORS.items()), "commit": hung.commit, "abort": hung.abort}
    if step == "abort":
        calls[step]()
    else:
        with pytest.raises(RefitError, match=r"this push is over.*; status\(\) tells what serves"):
            calls[step]()
        assert f"ignored {step}" in control.calls
    assert control.paused
    other.load(TENSORS.items())
    other.commit()
    assert not control.paused


def _lost(info: Mapping[str, Any]) -> None:
    if info["op"] == "commit":
        raise RefitError("no answer within 300 s")


def test_a_commit_whose_answer_is_lost_is_a_commit() -> None:
    """The status tells whether it happened: if it did, the push has succeeded; if not, the previous weights serve; and
    if there is no status, the error does not pretend to know."""
    control = Control()
    control.after_update = _lost
    assert push(RemoteEngine(control, InlinePlane())).policy_version == 7
    assert control.calls[-3:] == ["version 7", "resume", "finish"]
    control = Control()
    control.before_update = _lost
    with pytest.raises(RefitError, match="no answer within 300 s; the previous weights keep serving"):
        push(RemoteEngine(control, InlinePlane()))
    assert control.calls[-3:] == ["abort", "resume", "finish"]
    control = Control()

    def gone(info: Mapping[str, Any]) -> None:
        if info["op"] == "commit":
            control.status = []
            raise RefitError("connection refused")

    control.after_update = gone
    with pytest.raises(RefitError, match=r"connection refused; the commit was under way.*none of its workers answered"):
        push(RemoteEngine(control, InlinePlane()))


def test_an_interrupt_while_a_commit_is_answered_keeps_what_was_committed() -> None:
    """Nothing is rolled back that serves already, and requests run again."""
    control = Control()

    def interrupt(info: Mapping[str, Any]) -> None:
        if info["op"] == "commit":
            raise KeyboardInterrupt

    control.after_update = interrupt
    with pytest.raises(KeyboardInterrupt):
        push(RemoteEngine(control, InlinePlane()))
    assert "abort" not in control.calls
    assert not control.paused
    assert not control.status[0]["open"]


def test_an_engine_that_is_started_anew_during_a_push() -> None:
    """The error says so, and the new engine is neither aborted nor resumed."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane())
    engine.begin(MANIFEST)
    control.status = Control().status
    for status in control.status:
        status["instance"] = "y"
    before = list(control.calls)
    with pytest.raises(RefitError, match="engine: was started anew"):
        engine.load(TENSORS.items())
    assert control.calls == [*before, "ignored load"]
    control.paused = False
    assert push(engine).policy_version == 7


def test_a_prefix_cache_that_cannot_be_reset_ends_the_push() -> None:
    """New weights never answer with old key/value blocks: the previous ones go on."""
    control = Control()
    control.cache_resets = False
    with pytest.raises(RefitError, match=r"prefix cache; the previous weights keep serving"):
        push(RemoteEngine(control, InlinePlane()))
    assert "commit" not in control.calls
    assert not control.paused


def test_another_version_of_the_protocol_is_refused() -> None:
    """Trainer and engine with different releases say so before anything is sent."""
    control = Control()
    control.protocol = PROTOCOL + 1
    with pytest.raises(RefitError, match=rf"version {PROTOCOL + 1} of the refit.*same vllm-quads on both sides"):
        push(RemoteEngine(control, InlinePlane()))
    assert control.calls == []


def test_an_engine_that_another_process_sent_to_sleep_is_woken() -> None:
    """A trainer that has been started anew does not write into memory that is not there."""
    control = Control()
    RemoteEngine(control, InlinePlane()).sleep(2)
    for status in control.status:
        status["asleep"] = True
    push(RemoteEngine(control, InlinePlane()))
    assert control.calls[:4] == ["pause wait", "sleep 2", "wake ['weights']", "start"]
    assert control.calls[-2:] == ["wake ['kv_cache']", "finish"]
    assert not control.paused
    engine = RemoteEngine(control, InlinePlane())
    for status in control.status:
        status["asleep"] = False
    engine.sleep(1)
    with pytest.raises(RefitError, match=r"call wake_up\(\) before a push"):
        push(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(level: int) -> None:
    """After level 1 requests run at once; after level 2 only when new weights have been committed."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane())
    engine.sleep(level)
    engine.wake_up()
    assert control.paused is (level == 2)
    push(engine)
    assert not control.paused
    wakes = [c for c in control.calls if c.startswith("wake")]
    assert wakes == (["wake None"] if level == 1 else ["wake ['weights']", "wake ['kv_cache']"])
    with pytest.raises(RefitError, match="level: is 3"):
        engine.sleep(3)


def test_after_level_2_a_failed_push_does_not_wake_the_engine() -> None:
    """There are no weights to go back to."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane())
    engine.sleep(2)
    engine.wake_up()
    for status in control.status:
        status.update(state="refusing", reason="slept at level 2")
    control.fail = ("load", 0)
    with pytest.raises(RefitError, match="refuses to serve until a refit succeeds"):
        push(engine)
    assert control.paused
    control.fail = None
    for status in control.status:
        status.update(state="serving", reason="")
    push(engine)
    assert not control.paused


def test_a_trainer_that_dies_while_it_makes_tensors_aborts() -> None:
    """An error of the trainer's own stream ends the update and is raised unchanged."""
    control = Control()
    engine = RemoteEngine(control, InlinePlane(bucket_bytes=1))

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "a.weight", TENSORS["a.weight"]
        raise OSError("out of memory")

    engine.begin(MANIFEST)
    with pytest.raises(OSError, match="out of memory"):
        engine.load(stream())
    assert control.calls[-3:] == ["abort", "resume", "finish"]
    with pytest.raises(RefitError, match=r"call begin\(manifest\) first"):
        engine.commit()


def test_the_disk_plane_leaves_nothing_behind(tmp_path: Any) -> None:
    """Each file is gone after its message, whether that succeeds or not, and the directory after `close`."""
    seen: list[str] = []

    class Reading(Control):
        def update(self, info: Mapping[str, Any]) -> None:
            if info["op"] == "load":
                seen.append(info["file"])
                assert len(list(tmp_path.rglob("*.safetensors"))) == 1
            super().update(info)

    plane = DiskPlane(tmp_path, bucket_bytes=1)
    push(RemoteEngine(Reading(), plane))
    assert len(seen) == 2
    assert not list(tmp_path.rglob("*.safetensors"))
    plane.close()
    assert not list(tmp_path.iterdir())
    push(RemoteEngine(Reading(), DiskPlane(tmp_path)))  # not closed
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_trainer_left_behind_is_removed(tmp_path: Any) -> None:
    """By the next trainer on the same machine; directories of the living, of other machines and of others' stay."""
    killed, living, newer = (DiskPlane(tmp_path) for _ in range(3))
    killed.connect(Control(), "")
    left = killed._directory
    assert left is not None
    assert killed._remove is not None
    assert killed._lock is not None
    killed._remove.detach()
    killed._lock.close()  # as the end of its process does
    elsewhere, foreign = tmp_path / "quads-refit-elsewhere", tmp_path / "quads-refit-foreign"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("another machine")
    foreign.mkdir()
    living.connect(Control(), "")
    assert not left.exists()
    newer.connect(Control(), "")
    assert living._directory is not None
    assert living._directory.is_dir()
    assert elsewhere.is_dir()
    assert foreign.is_dir()
    living.close()
    newer.close()
    assert {p.name for p in tmp_path.iterdir()} == {elsewhere.name, foreign.name}


# -- HTTP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub() -> Iterator[Callable[[dict[str, tuple[int, str]]], str]]:
    """stub({route: (status, body)}) -> address of a server that answers so, and 404 otherwise."""
    servers: list[http.server.HTTPServer] = []

    def start(routes: dict[str, tuple[int, str]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = routes.get(self.path.partition("?")[0], (404, "Not Found"))
                if code == 0:
                    return  # no answer
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_without_developer_mode_is_told_what_it_lacks(stub: Callable[..., str]) -> None:
    """404 names VLLM_SERVER_DEV_MODE."""
    url = stub({"/metrics": (200, "quads_policy_version 0")})
    with pytest.raises(RefitError, match="VLLM_SERVER_DEV_MODE=1"):
        HttpEngine(url).status()


def test_a_server_of_another_quantization_is_not_asked(stub: Callable[..., str]) -> None:
    """Its workers see nothing of a trainer that came to the wrong address."""
    info = json.dumps({"vllm_config": "model='m', quantization=fp8, seed=0"})
    url = stub({"/metrics": (200, ""), "/server_info": (200, info), "/collective_rpc": (500, "must not be asked")})
    with pytest.raises(RefitError, match="serves quantization 'fp8', expected 'quads'"):
        HttpEngine(url).status()


def test_errors_of_a_server_are_passed_on(stub: Callable[..., str]) -> None:
    """The server's own words, a refused key, a server that is gone, and one that does not answer."""
    url = stub({"/metrics": (200, "quads_policy_version 0"), "/collective_rpc": (500, "EngineDeadError"),
                "/pause": (401, "Unauthorized"), "/resume": (0, "")})  # fmt: skip
    with pytest.raises(RefitError, match="answered 500: EngineDeadError"):
        HttpEngine(url).status()
    with pytest.raises(RefitError, match="api_key"):
        HttpControl(url).pause("wait")
    with pytest.raises(RefitError, match=r"cannot be reached|no answer"):
        HttpControl(url, timeout=0.5).resume()
    with pytest.raises(RefitError, match=r"cannot be reached.*is the server running"):
        HttpEngine("http://127.0.0.1:9").status()


def test_addresses_and_data_planes_are_checked() -> None:
    """What cannot work is refused when the engine is made."""
    with pytest.raises(RefitError, match="not the address of a server"):
        HttpEngine("localhost:8000")
    with pytest.raises(RefitError, match="pass `directory`"):
        HttpEngine("http://gpu-7:8000", "disk")
    with pytest.raises(RefitError, match="'carrier pigeon'"):
        HttpEngine("http://localhost:8000", "carrier pigeon")
    with pytest.raises(RefitError, match="in_flight: is 'drop'"):
        HttpEngine("http://localhost:8000", in_flight="drop")
    assert isinstance(as_engine("http://localhost:8000"), HttpEngine)


def test_a_report_reads_as_one_line() -> None:
    """Promise: printing a report says version, size, phases and fingerprint, not the fields of a dataclass; the time is
    that of the trainer's clock where it told, since phases of a GPU overlap."""
    report = RefitReport(7, "f" * 16, 2, 2_000_000_000, {"install": 0.5, "verify": 1e-7, "trainer_check": 0.25})
    for told, total in (({}, "0.5"), ({"trainer_total": 0.625}, "0.625")):
        assert str(report.with_seconds(**told)) == (
            f"policy version 7: 2 tensors, 2 GB (packed) in {total} s (install 0.5 s, trainer_check 0.25 s); "
            "fingerprint ffffffffffffffff, verified"
        )
