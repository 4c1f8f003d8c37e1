"""Batches made ahead in order, by a thread or by processes that are replaced when they die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TYPE_CHECKING

from lctrain.data.images.batch import BatchBuilder, Work
from lctrain.errors import DataError

if TYPE_CHECKING:
    import torch

MAX_DEATHS = 3  # at the same batch
# Imported once for all processes of a rank. Not pyarrow, whose allocator has a thread; that of NumPy's BLAS ends
# before a fork.
_PRELOAD = ("torch", "PIL.Image", "simplejpeg")


def make_ahead(
    builder: BatchBuilder, works: Iterator[Work], *, workers: int, ahead: int, report: Callable[[str], None] = print
) -> Generator[tuple[Work, torch.Tensor], None, None]:
    """(work, its pixels) in the order of `works`; close it to stop early.

    workers: processes; 0 is a thread of this one. ahead: batches under way beyond the one that is used; 0 and no
    workers makes each when it is asked for. A process that dies is reported and replaced, and its batches are made
    again. Raises DataError after MAX_DEATHS deaths at one batch.
    """
    if not workers and not ahead:
        for work in works:
            yield work, builder.images(work)
        return
    pool = _start(builder, workers)
    pending: deque[tuple[Work, Future[torch.Tensor]]] = deque()
    deaths = 0
    try:
        while True:
            for later in islice(works, max(ahead, 1) - len(pending)):
                pending.append((later, _submit(pool, builder, later)))
            if not pending:
                return
            work, future = pending[0]
            try:
                images = future.result()
            except BrokenProcessPool as error:
                deaths += 1
                _mourn(work, deaths, report, error)
                pool.shutdown()
                pool = _start(builder, workers)
                pending = deque((w, f if _made(f) else _submit(pool, builder, w)) for w, f in pending)
                continue
            deaths = 0
            pending.popleft()
            yield work, images
    finally:
        pool.shutdown(cancel_futures=True)


def _start(builder: BatchBuilder, workers: int) -> Executor:
    if not workers:
        return ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    # Never a fork of this process: it has the threads of the collectives, whose locks a fork would copy. The fork
    # server is a clean process that has imported what the workers need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOAD])
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(builder,))


def _submit(pool: Executor, builder: BatchBuilder, work: Work) -> Future[torch.Tensor]:
    if isinstance(pool, ThreadPoolExecutor):
        return pool.submit(builder.images, work)
    try:
        return pool.submit(_make, work)
    except BrokenProcessPool as error:  # found when the batch is asked for, like any other death
        failed: Future[torch.Tensor] = Future()
        failed.set_exception(error)
        return failed


def _made(future: Future[torch.Tensor]) -> bool:
    """Done, with pixels or with an error of its own."""
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)


def _mourn(work: Work, deaths: int, report: Callable[[str], None], error: BrokenProcessPool) -> None:
    if deaths < MAX_DEATHS:
        report(f"data: a decoding process died at step {work.step}; the processes are started again")
        return
    raise DataError(
        f"decoding processes died {deaths} times at step {work.step}; the kernel kills a process when memory or "
        "/dev/shm runs out: lower data.workers or data.prefetch, or find the image that does it with data.workers=0"
    ) from error


_builder: BatchBuilder


def _begin(builder: BatchBuilder) -> None:
    """In a new process: take the builder, and end with the rank."""
    import torch

    global _builder
    _builder = builder
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which still finishes its step
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def _make(work: Work) -> torch.Tensor:
    return _builder.images(work, share=True)
