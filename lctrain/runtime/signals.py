"""Signals that end a wait, whenever they come."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_S = 0.5
GIVING_UP_S = 5.0


class GivingUp:
    """Raises `error` when called, but not again within GIVING_UP_S: what is open is closed meanwhile, undisturbed."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error, self._raised = error, -math.inf

    def __call__(self, *_: object) -> None:
        if time.monotonic() - self._raised > GIVING_UP_S:
            self._raised = time.monotonic()
            raise self._error


@contextmanager
def insisting(*numbers: int, by: int) -> Iterator[None]:
    """Within it, a signal of `numbers` is followed by signal `by`, again and again until the block is left.

    Python runs a signal's handler between two instructions of the main thread. A signal that comes just before that
    thread waits for a lock is heard only after the wait; a handler that raises while a destructor runs does so to no
    effect. Another signal interrupts the wait, and is a second chance to raise. Main thread only; both signals need
    handlers of Python's.
    """
    main, left = threading.get_ident(), threading.Event()
    heard, told = socket.socketpair()
    told.setblocking(False)

    def insist() -> None:
        while number := heard.recv(1):
            while number[0] in numbers and not left.wait(AGAIN_S):
                signal.pthread_kill(main, by)

    watcher = threading.Thread(target=insist, name="signals", daemon=True)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        watcher.start()
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        told.close()
        watcher.join()
        heard.close()
