"""Pieces to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lctrain.data.pieces import Piece
from lctrain.ops.attention.documents import Documents
from lctrain.ops.text_batch import IGNORE, TextBatch


def collate(rows: Sequence[Sequence[Piece]], *, pad_id: int, multiple: int = 1) -> TextBatch:
    """Lay rows of pieces out as [B, S], S the longest row rounded up to `multiple` (at least that).

    Every piece is a document with positions from 0. What is left of a row is one more document,
    of `pad_id` without labels; a row without pieces is nothing else.
    """
    longest = max(sum(len(piece.ids) for piece in row) for row in rows)
    width = max(-(-longest // multiple), 1) * multiple
    shape = (len(rows), width)
    ids = np.full(shape, pad_id, np.int64)
    positions = np.empty(shape, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    lengths: list[int] = []
    for number, row in enumerate(rows):
        start = 0
        for piece in row:
            end = start + len(piece.ids)
            ids[number, start:end] = piece.ids
            labels[number, start:end] = piece.labels
            positions[number, start:end] = np.arange(end - start)
            lengths.append(end - start)
            start = end
        positions[number, start:] = np.arange(width - start)
        lengths.append(width - start)
    return TextBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        labels=torch.from_numpy(labels),
        documents=Documents.from_lengths(lengths),
        count=int((labels != IGNORE).sum()),
        tokens=sum(len(piece.ids) for row in rows for piece in row),
    )
