"""Requests to stop, passed on to the ranks a launcher started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


class Forwarding:
    """Within it, SIGTERM and the first Ctrl-C reach the ranks as SIGTERM; a second Ctrl-C kills them and leaves.

    send: sends a signal to every rank that still runs.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._interrupts = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                self._send(signal.SIGKILL)
                os._exit(128 + signal.SIGINT)
            print("stopping after this step and saving; Ctrl-C again leaves at once", file=sys.stderr, flush=True)
        self._send(signal.SIGTERM)
