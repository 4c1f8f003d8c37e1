"""Batches of images for one data rank: training steps that any world size repeats, and validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lctrain.config.images import ImagesConfig
from lctrain.data.images.batch import BatchBuilder, Work
from lctrain.data.images.columns import labels_of
from lctrain.data.images.pool import make_ahead
from lctrain.data.images.store import ImageStore
from lctrain.data.order import EMPTY, DataShare, SampleOrder
from lctrain.ops.image_batch import IGNORE, ImageBatch

if TYPE_CHECKING:
    import torch

MOST_WORKERS = 8


class ImageLoader:
    """The micro-batches of each step for one data rank.

    seed: of crops and flips. data_rank, data_size: this rank's place on the data axis. workers: decoding processes;
    0 decodes in a thread of the rank, or at once where prefetch is 0. prefetch: steps made ahead. report: told when
    a process died. accumulation: micro-batches of a step on each data rank. Raises ConfigError where the global batch
    does not divide into micro-batches.
    """

    def __init__(
        self,
        store: ImageStore,
        *,
        cfg: ImagesConfig,
        order: SampleOrder,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        micro_batch_size: int = 1,
        workers: int = 0,
        prefetch: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self._share = DataShare(rank=data_rank, size=data_size, micro_batch_size=micro_batch_size)
        self.accumulation = self._share.accumulation(order.global_batch_size)
        self._builder, self._labels = BatchBuilder(store, cfg=cfg, seed=seed), labels_of(store)
        self._order, self._augment_epochs = order, cfg.augment_epochs
        self._workers, self._prefetch, self._report = workers, prefetch, report

    def iterate(self, start_step: int, end_step: int) -> Iterator[tuple[int, list[ImageBatch]]]:
        """(step, its micro-batches) for start_step <= step < end_step; close it to stop threads and processes early."""
        works = (work for step in range(start_step, end_step) for work in self._works(step))
        batches = _batches(
            self._builder,
            self._labels,
            works,
            workers=self._workers,
            ahead=max(self._prefetch * self.accumulation, _enough_for(self._workers, self._prefetch)),
            report=self._report,
        )
        try:
            for step in range(start_step, end_step):
                yield step, [next(batches) for _ in range(self.accumulation)]
        finally:
            batches.close()

    def first(self, count: int) -> ImageBatch:
        """The first images this rank trains on, at most `count`."""
        work = self._works(0)[0]
        cut = replace(work, **{name: getattr(work, name)[:count] for name in ("indices", "epochs", "augment")})
        return _batch(cut, self._builder.images(cut), self._labels)

    def _works(self, step: int) -> list[Work]:
        indices, epochs = self._order.step_indices(step), self._order.step_epochs(step)
        augment = np.ones(len(indices), bool)
        if self._augment_epochs is not None:
            augment = self._order.before(step, self._augment_epochs)
        runs = self._share.runs(np.arange(len(indices)))
        return [Work(indices[run], epochs[run], augment[run], step=step) for run in runs]


def image_eval_batches(
    store: ImageStore,
    *,
    cfg: ImagesConfig,
    data_rank: int = 0,
    data_size: int = 1,
    micro_batch_size: int = 1,
    max_images: int | None = None,
    workers: int = 0,
    report: Callable[[str], None] = print,
) -> Generator[ImageBatch, None, None]:
    """This rank's share of the first max_images images (None: all), each on one rank exactly once.

    Every rank gets equally many batches: places beyond the last image are zeros with label IGNORE.
    """
    count = len(store) if max_images is None else min(len(store), max_images)
    nothing = np.zeros(micro_batch_size, np.int64)
    runs = DataShare(rank=data_rank, size=data_size, micro_batch_size=micro_batch_size).validation(count)
    works = (Work(run, nothing, nothing.astype(bool), step=number) for number, run in enumerate(runs))
    return _batches(
        BatchBuilder(store, cfg=cfg, seed=0),
        labels_of(store),
        works,
        workers=workers,
        ahead=max(cfg.prefetch, _enough_for(workers, cfg.prefetch)),
        report=report,
    )


def choose_workers(cfg: ImagesConfig, ranks_here: int, *, raw: bool = False) -> int:
    """data.workers, or for null the cores this process may use shared among `ranks_here` ranks, at most MOST_WORKERS.

    raw: the images are kept as pixels; then null is 0, for there is nothing to decode.
    """
    if cfg.workers is not None:
        return cfg.workers
    return 0 if raw else max(1, min(len(os.sched_getaffinity(0)) // ranks_here, MOST_WORKERS))


def _enough_for(workers: int, prefetch: int) -> int:
    """Batches under way that leave no process idle."""
    return workers + prefetch if workers else 0


def _batches(
    builder: BatchBuilder,
    labels: np.ndarray,
    works: Iterator[Work],
    *,
    workers: int,
    ahead: int,
    report: Callable[[str], None],
) -> Generator[ImageBatch, None, None]:
    made = make_ahead(builder, works, workers=workers, ahead=ahead, report=report)
    try:
        for work, images in made:
            yield _batch(work, images, labels)
    finally:
        made.close()


def _batch(work: Work, images: torch.Tensor, labels: np.ndarray) -> ImageBatch:
    import torch

    live = work.indices != EMPTY
    return ImageBatch(images, torch.from_numpy(np.where(live, labels[work.indices], IGNORE)), int(live.sum()))
