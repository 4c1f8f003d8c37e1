"""One document, or a part of a long one, as it stands in a sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lctrain.ops.text_batch import IGNORE


class Piece(NamedTuple):
    """ids [L] int32 and labels [L] int64; labels[t] is the target at position t or IGNORE."""

    ids: np.ndarray
    labels: np.ndarray


def piece_of(ids: np.ndarray, loss_mask: np.ndarray | None = None, *, following: int | None = None) -> Piece:
    """Shift the labels of a piece.

    loss_mask: [L], true where predicting ids[t] is trained; None means everywhere. following: the
    document's next token, to be predicted at the last position; None at the end of a document, or
    where that token carries no loss.
    """
    labels = np.full(len(ids), IGNORE, np.int64)
    labels[:-1] = ids[1:] if loss_mask is None else np.where(loss_mask[1:], ids[1:], IGNORE)
    if following is not None:
        labels[-1] = following
    return Piece(ids, labels)
