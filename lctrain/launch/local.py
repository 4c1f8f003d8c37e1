"""Start the ranks of one machine, watch them, end them together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from lctrain.errors import EXIT_BUG, EXIT_ECHO, EXIT_OK, EXIT_PREEMPTED
from lctrain.launch.forward import Forwarding
from lctrain.runtime.process import STORE_FD, listen

_POLL_S = 0.05
_NOT_CAUSES = (None, EXIT_OK, EXIT_PREEMPTED, EXIT_ECHO)
_GRACE_S = 3.0  # how long the others may take to end by themselves once one rank failed


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m lctrain.worker ARGUMENTS` as `ranks` processes; returns the job's exit code.

    The first rank that fails decides the code and ends the others within seconds. SIGTERM and the first
    Ctrl-C are passed on once (the ranks finish their step, save and exit 75); a second Ctrl-C kills them.
    """
    sock = listen()
    try:
        processes = [_start(arguments, rank, ranks, sock.fileno(), sock.getsockname()[1]) for rank in range(ranks)]
    finally:
        sock.close()
    with Forwarding(lambda number: _send(processes, number)):
        return _watch(processes)


def _start(arguments: Sequence[str], rank: int, ranks: int, fd: int, port: int) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    env = {
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STORE_FD: str(fd),
        "LCTRAIN_PARENT": str(os.getpid()),
    }
    # A session of its own: Ctrl-C reaches this process alone, which passes it on exactly once.
    return subprocess.Popen(
        [sys.executable, "-m", "lctrain.worker", *arguments],
        env=env,
        pass_fds=[fd] if rank == 0 else [],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    failed: tuple[int, int] | None = None
    deadline = 0.0
    while True:
        codes = [p.poll() for p in processes]
        if failed is None:
            failed = next(((r, c) for r, c in enumerate(codes) if c not in _NOT_CAUSES), None)
            deadline = time.monotonic() + _GRACE_S
        if all(c is not None for c in codes):
            break
        if failed is not None and time.monotonic() > deadline:
            _send(processes, signal.SIGKILL)
        time.sleep(_POLL_S)
    if failed is None:
        code = next((c for c in codes if c), EXIT_OK)
        return EXIT_BUG if code == EXIT_ECHO else code
    return _explain(*failed)


def _explain(rank: int, code: int) -> int:
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = " (the system kills the largest process when memory runs out)" if -code == signal.SIGKILL else ""
    print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
    return EXIT_BUG


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
