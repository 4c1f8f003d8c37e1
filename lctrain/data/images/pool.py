"""Batches made ahead in order, by a thread or by processes that are replaced when they die."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from lctrain.data.images.batch import BatchBuilder, Work
from lctrain.data.images.slots import MappedSlots, Slots
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
    """(work, its pixels) in the order of `works`, whose sizes are equal; close it to stop early.

    workers: processes; 0 is a thread of this one. ahead: batches under way beyond the one that is used; 0 and no
    workers makes each when it is asked for. A process that dies is reported and replaced, and its batches are made
    again. Raises DataError after MAX_DEATHS deaths at one batch.
    """
    if workers:
        yield from _by_processes(builder, works, workers, max(ahead, 1), report)
    elif ahead:
        yield from _by_thread(builder, works, ahead)
    else:
        for work in works:
            yield work, builder.images(work)


def _by_thread(
    builder: BatchBuilder, works: Iterator[Work], ahead: int
) -> Generator[tuple[Work, torch.Tensor], None, None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    pending: deque[tuple[Work, Future[torch.Tensor]]] = deque()
    try:
        while True:
            pending.extend((work, pool.submit(builder.images, work)) for work in islice(works, ahead - len(pending)))
            if not pending:
                return
            work, future = pending.popleft()
            yield work, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class _Task:
    """A batch under way: what it is made of, the place for its pixels, and when it is done."""

    work: Work
    place: str
    done: Future[None]


def _by_processes(
    builder: BatchBuilder, works: Iterator[Work], workers: int, ahead: int, report: Callable[[str], None]
) -> Generator[tuple[Work, torch.Tensor], None, None]:
    pool, slots = _start(builder, workers), None
    pending: deque[_Task] = deque()
    deaths = 0
    try:
        while True:
            for work in islice(works, ahead - len(pending)):
                slots = slots or Slots(math.prod(builder.shape(work)))
                place = slots.take()
                pending.append(_Task(work, place, _submit(pool, work, place)))
            if not pending:
                return
            task = pending[0]
            try:
                task.done.result()
            except BrokenProcessPool as error:
                deaths += 1
                _mourn(task.work, deaths, report, error)
                pool.shutdown()  # waits for the others, which it has ended: nobody writes into a place any more
                pool = _start(builder, workers)
                for lost in pending:
                    if not _made(lost.done):
                        lost.done = _submit(pool, lost.work, lost.place)
                continue
            deaths = 0
            assert slots is not None
            pending.popleft()
            yield task.work, slots.tensor(task.place).view(builder.shape(task.work))
    finally:
        pool.shutdown(cancel_futures=True)
        if slots is not None:
            slots.close()


def _start(builder: BatchBuilder, workers: int) -> ProcessPoolExecutor:
    # Never a fork of this process: it has the threads of the collectives, whose locks a fork would copy. The fork
    # server is a clean process that has imported what the workers need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOAD])
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(builder,))


def _submit(pool: ProcessPoolExecutor, work: Work, place: str) -> Future[None]:
    try:
        return pool.submit(_make, work, place)
    except BrokenProcessPool as error:  # found when the batch is asked for, like any other death
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed


def _made(future: Future[None]) -> bool:
    """Done, with pixels or with an error of its own."""
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)


def _mourn(work: Work, deaths: int, report: Callable[[str], None], error: BrokenProcessPool) -> None:
    if deaths < MAX_DEATHS:
        report(f"data: a decoding process died at step {work.step}; the processes are started again")
        return
    raise DataError(
        f"decoding processes died {deaths} times at step {work.step}; the kernel kills a process when memory runs "
        "out: lower data.workers or data.prefetch, or find the image that does it with data.workers=0"
    ) from error


_builder: BatchBuilder
_slots: MappedSlots


def _begin(builder: BatchBuilder) -> None:
    """In a new process: take the builder, and end with the rank."""
    import torch

    global _builder, _slots
    _builder, _slots = builder, MappedSlots()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which still finishes its step
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def _make(work: Work, place: str) -> None:
    _builder.images(work, out=_slots.tensor(place).view(_builder.shape(work)))
