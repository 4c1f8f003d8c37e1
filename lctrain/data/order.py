"""The order contract: which samples make a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lctrain.errors import ConfigError

EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """One permutation of all samples after another, cut into global batches.

    A pure function of these fields and the step: never of world size, layout, workers or history.

    size: samples in the data set. seed: any integer. global_batch_size: samples a step.
    limit: samples before the data ends; later places of a step are EMPTY. None means no end.
    """

    size: int
    seed: int
    global_batch_size: int
    limit: int | None = None

    def __post_init__(self) -> None:
        assert self.size > 0, "an order of no samples"
        assert self.global_batch_size > 0, self.global_batch_size

    def step_indices(self, step: int) -> np.ndarray:
        """The samples of `step` (from 0), [global_batch_size] int64; EMPTY past the limit."""
        places = self._places(step)
        indices = np.full(len(places), EMPTY, np.int64)
        live = len(places) if self.limit is None else int((places < self.limit).sum())
        epochs, within = np.divmod(places[:live], self.size)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            indices[:live][chosen] = _permutation(self.size, self.seed, epoch)[within[chosen]]
        return indices

    def step_epochs(self, step: int) -> np.ndarray:
        """The pass over the data (from 0) that each place of `step` belongs to, [global_batch_size] int64."""
        return self._places(step) // self.size

    def before(self, step: int, epochs: float) -> np.ndarray:
        """Which places of `step` come before so many passes over the data end, [global_batch_size] bool."""
        return self._places(step) < self.samples_in(epochs)

    def samples_in(self, max_epochs: float) -> int:
        """Samples in so many epochs, rounded up: the limit of a run of that length."""
        return math.ceil(round(max_epochs * self.size, 6))  # 1.1 * 10 is 11.000000000000002

    def steps_for(self, max_epochs: float) -> int:
        """Steps that see all samples of so many epochs; the last one may be uneven."""
        return -(-self.samples_in(max_epochs) // self.global_batch_size)

    def epoch_of(self, step: int) -> float:
        """Passes over the data before `step` begins."""
        seen = step * self.global_batch_size
        return (seen if self.limit is None else min(seen, self.limit)) / self.size

    def _places(self, step: int) -> np.ndarray:
        start = step * self.global_batch_size
        return np.arange(start, start + self.global_batch_size, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class DataShare:
    """What one data rank takes of the samples of a step or of a validation split.

    rank, size: its place on the data axis. micro_batch_size: samples of one of its micro-batches.
    """

    rank: int = 0
    size: int = 1
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def accumulation(self, global_batch_size: int) -> int:
        """Micro-batches of a step. Raises ConfigError where the batch does not divide into them."""
        at_once = self.size * self.micro_batch_size
        if global_batch_size % at_once:
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} must be a multiple of train.micro_batch_size="
                f"{self.micro_batch_size} x {self.size} data ranks; change one of the two sizes"
            )
        return global_batch_size // at_once

    def runs(self, places: np.ndarray) -> np.ndarray:
        """[micro-batches, micro_batch_size]: micro-batch i of rank r takes the (i * size + r)-th run of `places`."""
        return places.reshape(-1, self.size, self.micro_batch_size)[:, self.rank]

    def validation(self, count: int) -> np.ndarray:
        """Its share of samples 0 to count - 1, as `runs`; every rank gets equally many, EMPTY beyond the last."""
        wide = self.size * self.micro_batch_size
        indices = np.full(-(-count // wide) * wide, EMPTY, np.int64)
        indices[:count] = np.arange(count)
        return self.runs(indices)


@lru_cache(maxsize=2)  # the current epoch and the next one, which a step may reach into
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # Raw bits and a stable sort: NumPy promises these streams for ever, but not those of
    # Generator.permutation, and a resumed run may have another NumPy.
    bits = np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.argsort(bits.random_raw(size), kind="stable")
    order.setflags(write=False)
    return order
