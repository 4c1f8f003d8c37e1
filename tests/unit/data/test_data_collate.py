from __future__ import annotations

import numpy as np
import torch

from lctrain.data.collate import collate
from lctrain.data.pieces import piece_of
from lctrain.ops.text_batch import IGNORE

PAD = 99


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_labels_shift_within_a_piece() -> None:
    assert piece_of(ids(5, 6, 7)).labels.tolist() == [6, 7, IGNORE]
    assert piece_of(ids(5, 6, 7), following=8).labels.tolist() == [6, 7, 8]
    assert piece_of(ids(5)).labels.tolist() == [IGNORE]
    mask = np.array([True, False, True])
    assert piece_of(ids(5, 6, 7), mask).labels.tolist() == [IGNORE, 7, IGNORE]


def test_rows_are_padded_with_one_trailing_document() -> None:
    rows = [[piece_of(ids(1, 2, 3)), piece_of(ids(4, 5))], [piece_of(ids(6, 7))], []]
    batch = collate(rows, pad_id=PAD, multiple=4)
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 4, 5, PAD, PAD, PAD],
        [6, 7, PAD, PAD, PAD, PAD, PAD, PAD],
        [PAD] * 8,
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5], [*range(8)]]
    no = IGNORE
    assert batch.labels.tolist() == [[2, 3, no, 5, no, no, no, no], [7, *[no] * 7], [no] * 8]
    assert batch.documents.cu_seqlens == (0, 3, 5, 8, 10, 16, 24)
    assert batch.count == 4
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64


def test_a_full_row_has_no_padding() -> None:
    batch = collate([[piece_of(ids(1, 2, 3, 4))]], pad_id=PAD, multiple=2)
    assert batch.input_ids.shape == (1, 4)
    assert batch.documents.cu_seqlens == (0, 4)


def test_nothing_but_empty_rows() -> None:
    batch = collate([[], []], pad_id=PAD, multiple=6)
    assert batch.input_ids.shape == (2, 6)
    assert batch.count == 0
    assert collate([[]], pad_id=PAD).input_ids.shape == (1, 1)
