from __future__ import annotations

import bisect
import itertools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lctrain.data.packing import best_fit, one_each, split_long


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 17))
def test_split_keeps_every_token_once(lengths: list[int], max_length: int) -> None:
    pieces = list(zip(*(a.tolist() for a in split_long(np.array(lengths, np.int64), max_length)), strict=True))
    tokens = [(document, at) for document, start, end in pieces for at in range(start, end)]
    assert tokens == [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    assert all(0 < end - start <= max_length for _, start, end in pieces)


@given(st.data(), st.integers(1, 5000))
def test_best_fit(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=120))
    order, offsets = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in order[a:b]) for a, b in itertools.pairwise(offsets)]
    assert all(0 < load <= capacity for load in loads)
    assert sorted(loads) == sorted(slow_best_fit(lengths, capacity))


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The definition: longest first, each into the fullest pack with room. Packs of equal load are alike."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(room, length)
        free = room.pop(at) if at < len(room) else capacity
        bisect.insort(room, free - length)
    return [capacity - left for left in room]


def test_best_fit_is_deterministic_and_quick() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 2, 100_000).astype(np.int64), 1, 32768)
    begun = time.process_time()
    order, offsets = best_fit(lengths, 32768)
    assert time.process_time() - begun < 5  # about 0.3 s; the bound is for a slow, busy machine
    again = best_fit(lengths, 32768)
    assert np.array_equal(order, again[0])
    assert np.array_equal(offsets, again[1])
    assert len(offsets) - 1 <= 1.01 * lengths.sum() / 32768 + 1


def test_without_packing() -> None:
    order, offsets = one_each(3)
    assert order.tolist() == [0, 1, 2]
    assert offsets.tolist() == [0, 1, 2, 3]
