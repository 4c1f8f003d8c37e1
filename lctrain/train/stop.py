"""SIGTERM and Ctrl-C: finish the step, save, exit. A second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopFlag:
    """Set by a signal; the trainer looks at it once a step, on all ranks together."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._pid = 0

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked helper, such as a tokenising process: its pool ends it by SIGTERM and waits until it did.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + signal.SIGINT)
