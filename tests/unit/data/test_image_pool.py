from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from lctrain.config.images import Crop
from lctrain.data.images.batch import BatchBuilder, Work
from lctrain.data.images.pool import MAX_DEATHS, make_ahead
from lctrain.data.images.store import ImageStore
from lctrain.errors import DataError
from tests.support.staged_images import config, decoders, jpeg_store, loader_of, seen


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return jpeg_store(tmp_path_factory.mktemp("jpegs") / "store")


def test_killed_workers_are_replaced(jpegs: ImageStore) -> None:
    cfg, lines = config(crop=Crop.random_resized), []
    wanted = seen(loader_of(jpegs, cfg, micro_batch_size=4), 0, 12)
    loader = loader_of(jpegs, cfg, micro_batch_size=4, workers=2, prefetch=2, report=lines.append)
    kept = []
    for step, batches in loader.iterate(0, 12):
        kept += [(step, batch) for batch in batches]
        if step in (1, 6):
            for worker in decoders():  # were one left, it might do what remains alone
                os.kill(worker.pid, signal.SIGKILL)
    # Batches that are kept are not written over, and outlive the processes.
    assert [(step, batch.images.numpy().tobytes(), batch.labels.tolist()) for step, batch in kept] == wanted
    assert len(lines) == 2
    assert all("decoding process died at step" in line for line in lines)
    assert decoders() == []


def test_memory_is_used_again_when_a_batch_is_gone(jpegs: ImageStore) -> None:
    loader = loader_of(jpegs, config(), micro_batch_size=8, workers=1, prefetch=1)
    places, before = [], len(os.listdir("/proc/self/fd"))
    for _, (batch,) in loader.iterate(0, 20):
        places.append(batch.images.data_ptr())
    assert len(set(places)) <= 4  # two under way, one that is used, one that is about to be
    del batch
    assert len(os.listdir("/proc/self/fd")) <= before

    steps = loader.iterate(0, 6)
    view = next(steps)[1][0].images[3]  # all that is kept of its batch
    copy = view.clone()
    assert len(list(steps)) == 5
    assert torch.equal(view, copy)


class _Deadly(BatchBuilder):
    """Dies at step 2, as a process does that needs too much memory."""

    def images(self, work: Work, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if work.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().images(work, out=out)


def test_a_batch_that_always_kills_ends_the_run(jpegs: ImageStore) -> None:
    lines: list[str] = []
    works = (Work(np.array([s]), np.array([0]), np.array([False]), step=s) for s in range(6))
    made = make_ahead(_Deadly(jpegs, cfg=config(), seed=0), works, workers=1, ahead=1, report=lines.append)
    assert [next(made)[0].step for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match=rf"died {MAX_DEATHS} times at step 2.*data\.workers"):
        next(made)
    assert len(lines) == MAX_DEATHS - 1
    assert decoders() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_early_stops_threads_and_processes(jpegs: ImageStore, workers: int) -> None:
    steps = loader_of(jpegs, config(), workers=workers, prefetch=3).iterate(0, 10**9)
    assert next(steps)[0] == 0
    helpers = decoders() if workers else threading.enumerate()[1:]
    assert helpers
    steps.close()
    assert decoders() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


_RANK = """
import multiprocessing, sys
from pathlib import Path
from lctrain.config.images import ImagesConfig
from lctrain.data.images.decode import decode
from lctrain.data.images.loader import image_eval_batches
from lctrain.data.images.store import ImageStore
if __name__ == "__main__":
    batches = image_eval_batches(ImageStore(Path(sys.argv[1])), cfg=ImagesConfig(image_size=12), workers=1)
    next(batches)
    print(multiprocessing.active_children()[0].pid, flush=True)
    sys.stdin.read()
"""


def test_workers_end_with_a_rank_that_is_killed(jpegs: ImageStore) -> None:
    command = [sys.executable, "-c", _RANK, str(jpegs.folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as rank:
        assert rank.stdout is not None
        worker = os.pidfd_open(int(rank.stdout.readline()))
        rank.kill()
    try:
        assert select.select([worker], [], [], 30.0)[0], "the worker outlived its rank"
    finally:
        os.close(worker)
