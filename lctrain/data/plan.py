"""Which pieces make which sequence, worked out once and kept beside the tokens."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

import numpy as np

from lctrain.data.packing import best_fit, one_each, split_long
from lctrain.data.table import TokenTable
from lctrain.errors import DataError

PLAN_VERSION = 1


class Part(Enum):
    """Which documents of a source are meant."""

    whole = "whole"
    train = "train"
    held = "held"


@dataclass(frozen=True)
class Plan:
    """Sequences in an order of their own; training shuffles them (order.py).

    pieces: [P, 4] int64, columns row of the table, start, end, pack; sorted by pack.
    key: hash of what the plan depends on beside the tokens.
    """

    pieces: np.ndarray
    key: str

    @cached_property
    def offsets(self) -> np.ndarray:
        """Pack k is pieces[offsets[k]:offsets[k + 1]]; [packs + 1]."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.pieces[:, 3]))])

    @property
    def documents(self) -> int:
        """Documents the pieces come from."""
        return int((self.pieces[:, 1] == 0).sum())

    @property
    def tokens(self) -> int:
        """Tokens in all pieces."""
        return int((self.pieces[:, 2] - self.pieces[:, 1]).sum())


def load_plan(folder: Path, table: TokenTable, *, part: Part, held_out: float, max_length: int, packing: bool) -> Plan:
    """The plan kept in `folder`, made first if it is not there. Raises DataError: too few documents to hold out."""
    settings = [PLAN_VERSION, part.name, 0.0 if part is Part.whole else held_out, max_length, packing]
    key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
    path = folder / f"plan-{key}.npy"
    if path.is_file():
        return Plan(np.load(path, allow_pickle=False), key)
    pieces = _make(table, part=part, held_out=held_out, max_length=max_length, packing=packing)
    if os.access(folder, os.W_OK):  # a cache that several people read may be theirs to read only
        temporary = folder / f"plan-{key}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:
            np.save(file, pieces, allow_pickle=False)
        temporary.replace(path)
    return Plan(pieces, key)


def held_out_rows(identities: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out, [N] bool: the fraction whose hash is smallest, at least one.

    By content, so that a document stays on its side when others come or go, and its copies go with
    it unless that leaves nothing to train on. Raises DataError for fewer than two documents.
    """
    count = len(identities)
    if count < 2:
        raise DataError(
            f"data.held_out={fraction} needs at least two documents, and the source has {count}; "
            "set data.held_out=0, or data.eval_path to a source for validation"
        )
    wanted = min(max(round(fraction * count), 1), count - 1)
    chosen = np.argsort(identities, kind="stable")[:wanted]
    held = np.isin(identities, identities[chosen])
    if held.all():
        held[:] = False
        held[chosen] = True
    return held


def _make(table: TokenTable, *, part: Part, held_out: float, max_length: int, packing: bool) -> np.ndarray:
    rows = np.flatnonzero(table.lengths)
    if part is not Part.whole:
        held = held_out_rows(table.identities[rows], held_out)
        rows = rows[held if part is Part.held else ~held]
    document, start, end = split_long(table.lengths[rows], max_length)
    order, offsets = best_fit(end - start, max_length) if packing else one_each(len(start))
    pack = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.stack([rows[document][order], start[order], end[order], pack], axis=1)
