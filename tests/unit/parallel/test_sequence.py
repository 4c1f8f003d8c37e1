"""Columns of a sequence-parallel rank."""

from __future__ import annotations

import pytest
import torch

from lctrain.errors import ConfigError
from lctrain.ops.attention.documents import Documents
from lctrain.ops.text_batch import TextBatch
from lctrain.parallel.sequence import split_batch


def _batch(length: int) -> TextBatch:
    ids = torch.arange(2 * length).view(2, length)
    return TextBatch(ids, ids + 100, ids + 200, Documents((0, 3, length, 2 * length)), count=7, tokens=9)


def test_ranks_columns_are_the_batch_and_boundaries_stay_whole() -> None:
    batch = _batch(12)
    parts = [split_batch(batch, rank, 3) for rank in range(3)]
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], dim=1), getattr(batch, name))
    assert all(p.documents is batch.documents and (p.count, p.tokens) == (7, 9) for p in parts)


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.max_length=10.*sp_size=4.*8"):
        split_batch(_batch(10), 0, 4)
