"""Signals that would be heard only after a wait, or never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from lctrain.runtime import signals
from lctrain.runtime.signals import insisting
from lctrain.train.stop import StopFlag

LIMIT_S = 20.0


class Left(BaseException):
    """Handlers end the process; here they end a test."""


def leave(*_: object) -> NoReturn:
    raise Left


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals are insisted on soon; their handlers are given back afterwards."""
    monkeypatch.setattr(signals, "AGAIN_S", 0.1)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _wait_for_signal() -> None:
    """One that is marked without interrupting the wait, as if it had come just before it."""

    def send() -> None:
        threading.Event().wait(0.05)  # by then the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=send).start()
    threading.Event().wait(LIMIT_S)


def test_a_wait_is_ended_by_a_signal_that_comes_before_it() -> None:
    signal.signal(signal.SIGTERM, leave)
    begun = time.monotonic()
    with pytest.raises(Left), insisting(signal.SIGTERM, by=signal.SIGTERM):
        _wait_for_signal()
    assert time.monotonic() - begun < LIMIT_S


def test_preparation_ends_at_once_too() -> None:
    flag = StopFlag()
    flag.install()
    begun = time.monotonic()
    with pytest.raises(Left), flag.at_once(leave):
        _wait_for_signal()
    assert time.monotonic() - begun < LIMIT_S


def test_a_helper_that_is_forked_ends_with_its_parent() -> None:
    program = (
        "import os, signal; from lctrain.train.stop import StopFlag; StopFlag().install();"
        "os.fork() or signal.pause(); print('killed', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.returncode) == ("killed\n", -signal.SIGKILL)  # the helper, too, has let go of stdout


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
