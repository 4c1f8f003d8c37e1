"""Signals that end a wait whenever they come, and processes that end with another."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lctrain.errors import EXIT_BUG

AGAIN_S = 0.5


@contextmanager
def insisting(*numbers: int, by: int) -> Iterator[None]:
    """Within it, a signal of `numbers` is followed by signal `by`, again and again until the block is left.

    Python runs a signal's handler between two instructions of the main thread: a signal that comes just before that
    thread waits for a lock would be heard only after the wait. Another one interrupts it. The handlers must not
    count on coming once, and should end the process rather than raise: what is raised inside a destructor or an
    import may be lost. Main thread only; both signals need handlers of Python's.
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


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when `parent`, which started it, ends in any way; at once if it has."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(EXIT_BUG)
