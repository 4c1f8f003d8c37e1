"""SIGTERM and Ctrl-C: finish the step, save, exit. A second Ctrl-C leaves at once.

Before the first step there is nothing to finish: what is prepared (text, images) is given up at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lctrain.runtime.signals import GivingUp, insisting

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedEarly(BaseException):
    """A signal came before there was a step to finish. No Exception: what retries or explains those lets it through."""


class StopFlag:
    """Set by a signal; the trainer looks at it once a step, on all ranks together."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._at_once = False
        self._give_up = GivingUp(StoppedEarly)

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process, though not of helpers it forks."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._let_go)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise StoppedEarly for a signal inside, or one that has come already, instead of keeping it for a step."""
        with insisting(*_SIGNALS, by=signal.SIGTERM):  # another SIGINT would mean more
            self._at_once = True
            try:
                if self.requested:
                    raise StoppedEarly
                yield
            finally:
                self._at_once = False

    def _let_go(self) -> None:
        # A pool ends its processes by SIGTERM and waits for them without limit: that must end them at once. A
        # handler in Python would not do, because one that is tripped just before a process blocks never runs.
        for number in _SIGNALS:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + signal.SIGINT)
        if self._at_once:
            self._give_up()
