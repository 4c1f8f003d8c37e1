from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from lctrain.data.loader import TextLoader, eval_batches
from lctrain.data.order import SampleOrder
from lctrain.errors import ConfigError
from lctrain.ops.text_batch import TextBatch


def rows_of(batches: list[TextBatch]) -> list[tuple[int, ...]]:
    """The rows of all batches without padding; a row of padding only is ()."""
    return [tuple(row[row != 258].tolist()) for batch in batches for row in batch.input_ids]


def order_of(prepared, batch: int = 4, **more) -> SampleOrder:
    return SampleOrder(size=len(prepared), seed=7, global_batch_size=batch, **more)


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_any_layout_sees_the_same_samples_in_the_same_step(open_texts, size: int, micro: int) -> None:
    prepared = open_texts(max_length=40)
    order = order_of(prepared)
    for step in range(6):
        wanted = [tuple(t for p in prepared.sample(i) for t in p.ids.tolist()) for i in order.step_indices(step)]
        ranks = [
            TextLoader(prepared, order=order, data_rank=rank, data_size=size, micro_batch_size=micro).batches(step)
            for rank in range(size)
        ]
        assert {len(batches) for batches in ranks} == {4 // (size * micro)}
        # Micro-batches in turn over the ranks give back the global batch in its order.
        interleaved = [rows_of([batch]) for turn in zip(*ranks, strict=True) for batch in turn]
        assert [row for rows in interleaved for row in rows] == wanted


def test_an_epoch_trains_on_every_target_once(open_texts) -> None:
    prepared = open_texts(max_length=40)
    order = order_of(prepared)
    order = replace(order, limit=order.samples_in(1))
    loader = TextLoader(prepared, order=order, multiple=8)
    batches = [b for _, step in loader.iterate(0, order.steps_for(1)) for b in step]
    assert sum(batch.count for batch in batches) == prepared.tokens - prepared.documents
    assert all(batch.input_ids.shape[1] % 8 == 0 for batch in batches)
    assert len(batches) % 4 == 0
    assert rows_of(batches).count(()) == len(batches) - len(prepared)


def test_global_batch_must_divide(open_texts) -> None:
    prepared = open_texts()
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=4"):
        TextLoader(prepared, order=order_of(prepared), data_size=3)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_changes_nothing_but_the_time(open_texts, prefetch: int) -> None:
    prepared = open_texts()
    loader = TextLoader(prepared, order=order_of(prepared), prefetch=prefetch)
    steps = list(loader.iterate(2, 7))
    assert [step for step, _ in steps] == [2, 3, 4, 5, 6]
    for step, batches in steps:
        for ours, plain in zip(batches, loader.batches(step), strict=True):
            assert torch.equal(ours.input_ids, plain.input_ids)
            assert torch.equal(ours.labels, plain.labels)
    assert list(loader.iterate(3, 3)) == []


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_raises_in_the_consumer_and_stops(open_texts, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = open_texts()
    loader = TextLoader(prepared, order=order_of(prepared), prefetch=2)
    plain = loader.batches

    def failing(step: int) -> list[TextBatch]:
        if step == 2:
            raise RuntimeError("disk gone")
        return plain(step)

    monkeypatch.setattr(loader, "batches", failing)
    seen = []
    with pytest.raises(RuntimeError, match="disk gone"):
        seen.extend(step for step, _ in loader.iterate(0, 9))
    assert seen == [0, 1]
    assert not prefetch_threads()


def test_prefetch_stops_when_the_consumer_does(open_texts) -> None:
    prepared = open_texts()
    steps = TextLoader(prepared, order=order_of(prepared), prefetch=2).iterate(0, 1000)
    next(steps)
    assert prefetch_threads()
    steps.close()
    assert not prefetch_threads()


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("most", [None, 3])
def test_eval_gives_each_sequence_to_one_rank(open_texts, size: int, micro: int, most: int | None) -> None:
    prepared = open_texts(max_length=40)
    ranks = [
        list(eval_batches(prepared, data_rank=r, data_size=size, micro_batch_size=micro, max_sequences=most))
        for r in range(size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    rows = Counter(row for batches in ranks for row in rows_of(batches))
    del rows[()]
    wanted = range(len(prepared) if most is None else most)
    assert rows == Counter(tuple(np.concatenate([p.ids for p in prepared.sample(i)]).tolist()) for i in wanted)
