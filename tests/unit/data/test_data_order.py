from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lctrain.data.order import EMPTY, SampleOrder


@given(st.integers(1, 30), st.integers(-3, 2**40), st.integers(1, 12))
def test_every_epoch_is_a_permutation(size: int, seed: int, batch: int) -> None:
    order = SampleOrder(size=size, seed=seed, global_batch_size=batch)
    stream = np.concatenate([order.step_indices(step) for step in range(-(-3 * size // batch))])
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_global_batch_only_cuts_the_same_stream() -> None:
    wide = SampleOrder(size=10, seed=3, global_batch_size=12).step_indices(1)
    narrow = SampleOrder(size=10, seed=3, global_batch_size=4)
    assert wide.tolist() == np.concatenate([narrow.step_indices(step) for step in (3, 4, 5)]).tolist()


def test_pure_function_of_seed_and_step() -> None:
    order = SampleOrder(size=100, seed=1, global_batch_size=7)
    late = order.step_indices(1000)
    order.step_indices(0)
    assert np.array_equal(late, SampleOrder(size=100, seed=1, global_batch_size=7).step_indices(1000))
    assert not np.array_equal(late, SampleOrder(size=100, seed=2, global_batch_size=7).step_indices(1000))
    # A resumed run, on whatever machine and NumPy, must find the order it began with.
    assert SampleOrder(size=8, seed=0, global_batch_size=8).step_indices(0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


def test_limit_leaves_the_last_batch_uneven() -> None:
    free = SampleOrder(size=5, seed=0, global_batch_size=4)
    assert (free.samples_in(2), free.steps_for(2), free.steps_for(1.5)) == (10, 3, 2)
    order = SampleOrder(size=5, seed=0, global_batch_size=4, limit=free.samples_in(2))
    assert order.step_indices(2).tolist() == [*free.step_indices(2)[:2], EMPTY, EMPTY]
    assert order.step_indices(3).tolist() == [EMPTY] * 4
    assert order.epoch_of(1) == 0.8
    assert order.epoch_of(3) == 2.0


def test_epoch_of_each_place() -> None:
    order = SampleOrder(size=5, seed=0, global_batch_size=4)
    epochs = np.concatenate([order.step_epochs(step) for step in range(5)])
    assert epochs.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert order.step_epochs(1).dtype == np.int64
    # Half an epoch of five samples ends inside the first step, one and a half inside the second.
    assert order.before(0, 0.5).tolist() == [True, True, True, False]
    assert order.before(1, 1.5).tolist() == [True] * 4
    assert order.before(2, 1.5).tolist() == [False] * 4
    assert not order.before(0, 0.0).any()


@pytest.mark.parametrize(("size", "epochs", "samples"), [(10, 1.1, 11), (10, 0.3, 3), (3, 0.5, 2)])
def test_epochs_are_not_lengthened_by_rounding(size: int, epochs: float, samples: int) -> None:
    assert SampleOrder(size=size, seed=0, global_batch_size=1).samples_in(epochs) == samples
