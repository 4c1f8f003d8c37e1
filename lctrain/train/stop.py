"""SIGTERM and Ctrl-C: finish the step, save, exit. A second Ctrl-C leaves at once.

Before the first step there is nothing to finish: what is prepared (text, images) is given up at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lctrain.runtime.signals import end_with_parent, insisting

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Set by a signal; the trainer looks at it once a step, on all ranks together."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._leave: Callable[[], NoReturn] | None = None
        self._parent = os.getpid()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process, though not of helpers it forks."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        os.register_at_fork(before=self._before_fork, after_in_child=self._let_go)

    @contextmanager
    def at_once(self, leave: Callable[[], NoReturn]) -> Iterator[None]:
        """Call `leave` for a signal inside, or one that has come already, instead of keeping it for a step.

        It must end the process: it is called from a signal's handler, in the midst of anything.
        """
        with insisting(*_SIGNALS, by=signal.SIGTERM):  # another SIGINT would mean more
            self._leave = leave
            try:
                if self.requested:
                    leave()
                yield
            finally:
                self._leave = None

    def _let_go(self) -> None:
        # A pool ends its processes by SIGTERM and waits for them without limit: that must end them at once. A
        # handler in Python would not do, because one that is tripped just before a process blocks never runs.
        ours = [number for number in _SIGNALS if signal.getsignal(number) == self._handle]
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if ours:
            end_with_parent(self._parent)  # nobody else would end what waits for work from a process that is gone

    def _before_fork(self) -> None:
        self._parent = os.getpid()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + signal.SIGINT)
        if self._leave is not None:
            self._leave()
