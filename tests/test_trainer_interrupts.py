# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while ranks work together: when it takes effect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from trainer_models import qwen3

from trainer_qat import RolloutSync, prepare_qat
from trainer_qat.interrupts import interruptible, uninterrupted, whole_steps
from vllm_quads.refit import CollectiveEngine


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    """Every test leaves the handler that it found."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is usual


def test_it_waits_for_the_end_of_the_outermost_block() -> None:
    """Also over blocks within: the first SIGINT is obeyed when the last has ended, and nothing is left out before."""
    done = []

    def block() -> None:
        with uninterrupted():
            press()
            with uninterrupted():
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["inner", "outer"]


def test_pressed_twice_it_is_obeyed_at_once() -> None:
    """A user who does not want to wait does not have to."""
    done = []

    def block() -> None:
        with uninterrupted():
            press()
            with uninterrupted():
                press()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == []


@pytest.mark.parametrize("early", [True, False])
def test_an_interruptible_part(early: bool) -> None:
    """What has waited is obeyed as soon as a part begins that may be interrupted; what comes within it, at once; and
    what cleans up after it is not interrupted a second time."""
    done = []

    def block() -> None:
        with uninterrupted():
            if early:
                press()
            try:
                with interruptible():
                    done.append("within")
                    press()
                    done.append("never")
            finally:
                press()
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == (["cleaned up"] if early else ["within", "cleaned up"])


def test_steps_are_whole() -> None:
    """In a part that may be interrupted, an item that is being made is made to its end; the next can be made later."""
    done = []

    def items() -> Iterator[int]:
        for i in range(3):
            if i == 1:
                press()
            done.append(i)
            yield i

    source = items()

    def block() -> None:
        with uninterrupted(), interruptible():
            for _ in whole_steps(source):
                pass

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [0, 1]
    assert list(source) == [2]


def test_other_threads_are_never_interrupted() -> None:
    """Nor do they touch the handler, which only the main thread may."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with uninterrupted(), interruptible():
                pass
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=work)
    with uninterrupted():
        thread.start()
        thread.join()
    assert failures == []


class OneRank(FakeEngine):
    """An engine that says that other ranks wait for this one."""

    collective = True

    def decline(self, error: BaseException) -> None:
        """There are no others to be told."""
        self.calls.append("decline")


@pytest.mark.parametrize("kind", [FakeEngine, OneRank])
def test_a_push_into_one_rank_of_an_engine_is_not_interrupted(kind: type[FakeEngine]) -> None:
    """An engine whose ranks decide together is pushed to from beginning to end, though the trainer is not sharded; any
    other engine is told to give the push up."""
    model = qwen3()
    report = prepare_qat(model)
    engine = kind(report.contract, report.quantized)
    assert isinstance(engine, CollectiveEngine) == (kind is OneRank)
    begin = engine.begin

    def interrupted(manifest: object) -> None:
        begin(manifest)  # type: ignore[arg-type]
        press()

    engine.begin = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        RolloutSync(model, engine).push()
    assert engine.calls == (["begin", "load", "commit"] if kind is OneRank else ["begin", "abort"])


def test_a_push_that_is_not_offered_is_declined() -> None:
    """The other ranks of such an engine hear why this one does not come to their vote."""
    model = qwen3()
    report = prepare_qat(model)
    engine = OneRank(report.contract, report.quantized)
    with pytest.raises(Exception, match="rollback: is 'never', expected one of"):
        RolloutSync(model, engine).push(rollback="never")
    assert engine.calls == ["decline"]
