"""Signals that would be heard only after a wait, or never."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from lctrain.runtime import signals
from lctrain.runtime.signals import insisting
from lctrain.train.stop import StopFlag, StoppedEarly

LIMIT_S = 20.0


class Heard(BaseException):
    pass


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM raises Heard and is insisted on soon; the handlers are given back afterwards."""

    def handle(_: int, __: FrameType | None) -> None:
        raise Heard

    monkeypatch.setattr(signals, "AGAIN_S", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, handle)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _in_another_thread() -> None:
    """Marked, but the main thread's wait is not interrupted: as if the signal had come just before it."""

    def send() -> None:
        threading.Event().wait(0.05)  # by then it waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=send).start()


def _in_a_destructor() -> None:
    class Destroyed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Destroyed()


def _wait_after(send: Callable[[], None]) -> None:
    send()
    threading.Event().wait(LIMIT_S)


SENDERS = pytest.mark.parametrize("send", [_in_another_thread, _in_a_destructor])


@SENDERS
def test_a_wait_is_ended_by_a_signal_that_comes_before_it(send: Callable[[], None]) -> None:
    begun = time.monotonic()
    with pytest.raises(Heard), insisting(signal.SIGTERM, by=signal.SIGTERM):
        _wait_after(send)
    assert time.monotonic() - begun < LIMIT_S


@SENDERS
def test_preparation_ends_at_once_too(send: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "GIVING_UP_S", 0.3)
    flag = StopFlag()
    flag.install()
    begun = time.monotonic()
    with pytest.raises(StoppedEarly), flag.at_once():
        _wait_after(send)
    assert time.monotonic() - begun < LIMIT_S


def test_giving_up_is_not_disturbed() -> None:
    flag = StopFlag()
    flag.install()
    closed: list[bool] = []

    def prepare() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            threading.Event().wait(3 * signals.AGAIN_S)
            closed.append(True)

    with pytest.raises(StoppedEarly), flag.at_once():
        prepare()
    assert closed


def test_nothing_is_left_behind() -> None:
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    with insisting(signal.SIGTERM, by=signal.SIGTERM):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_are_left_alone() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    with insisting(signal.SIGTERM, by=signal.SIGUSR1):
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Event().wait(0.5)
    assert calls == [1]
