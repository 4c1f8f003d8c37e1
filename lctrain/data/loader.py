"""Batches of one data rank: training steps that any world size repeats, and validation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lctrain.data.collate import collate
from lctrain.data.order import EMPTY, DataShare, SampleOrder
from lctrain.data.prepared import PreparedData
from lctrain.ops.text_batch import TextBatch


class TextLoader:
    """The micro-batches of each step for one data rank.

    data_rank, data_size: this rank's place on the data axis; ranks that share a sequence share it.
    multiple: rows are padded to a multiple of this, so that sequence ranks get equal columns.
    prefetch: steps built ahead by a thread. accumulation: micro-batches of a step on each data rank.
    Raises ConfigError where the global batch does not divide into micro-batches.
    """

    def __init__(
        self,
        prepared: PreparedData,
        *,
        order: SampleOrder,
        data_rank: int = 0,
        data_size: int = 1,
        micro_batch_size: int = 1,
        multiple: int = 1,
        prefetch: int = 0,
    ) -> None:
        self._share = DataShare(rank=data_rank, size=data_size, micro_batch_size=micro_batch_size)
        self.accumulation = self._share.accumulation(order.global_batch_size)
        self._prepared, self._order = prepared, order
        self._multiple, self._prefetch = multiple, prefetch

    def batches(self, step: int) -> list[TextBatch]:
        """The micro-batches of `step`."""
        runs = self._share.runs(self._order.step_indices(step))
        return [batch_of(self._prepared, run, multiple=self._multiple) for run in runs]

    def iterate(self, start_step: int, end_step: int) -> Iterator[tuple[int, list[TextBatch]]]:
        """(step, batches(step)) for start_step <= step < end_step; close it to stop the thread early."""
        if not self._prefetch:
            for step in range(start_step, end_step):
                yield step, self.batches(step)
            return
        ahead: deque[Future[list[TextBatch]]] = deque()
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        try:
            upcoming = iter(range(start_step, end_step))
            for step in range(start_step, end_step):
                while len(ahead) < self._prefetch and (later := next(upcoming, None)) is not None:
                    ahead.append(pool.submit(self.batches, later))
                yield step, ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def eval_batches(
    prepared: PreparedData,
    *,
    data_rank: int = 0,
    data_size: int = 1,
    micro_batch_size: int = 1,
    multiple: int = 1,
    max_sequences: int | None = None,
) -> Iterator[TextBatch]:
    """This rank's share of the first max_sequences sequences (None: all), each on one rank exactly once.

    Every rank gets equally many batches: places beyond the last sequence are rows of padding.
    """
    count = len(prepared) if max_sequences is None else min(len(prepared), max_sequences)
    share = DataShare(rank=data_rank, size=data_size, micro_batch_size=micro_batch_size)
    for run in share.validation(count):
        yield batch_of(prepared, run, multiple=multiple)


def batch_of(prepared: PreparedData, indices: np.ndarray, *, multiple: int = 1) -> TextBatch:
    """The sequences `indices` as one batch; EMPTY becomes a row of padding."""
    rows = [[] if index == EMPTY else prepared.sample(index) for index in indices.tolist()]
    return collate(rows, pad_id=prepared.pad_id, multiple=multiple)
