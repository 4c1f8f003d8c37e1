"""Long documents to pieces, and pieces to packs of at most `capacity` tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


def split_long(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `max_length` tokens: (document, start, end), each [P] int64.

    lengths: tokens of each document, [N]. Pieces are in document order and together hold every
    token once. A piece attends to itself only; the label of its last token is the document's next
    token where there is one (see pieces.py), so that every token but a document's first is a target.
    """
    lengths = np.asarray(lengths, np.int64)
    counts = -(-lengths // max_length)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(document), dtype=np.int64) - first[document]) * max_length
    return document, start, np.minimum(start + max_length, lengths[document])


def one_each(count: int) -> tuple[np.ndarray, np.ndarray]:
    """No packing: (order [P], offsets [P + 1]) with a pack for every piece, in order."""
    return np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64)


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: (order [P], offsets [packs + 1]); pack k holds pieces order[offsets[k]:offsets[k + 1]].

    lengths: [P], each 1 to `capacity`. Longest first, each piece goes to the fullest pack it fits in
    (Johnson et al. 1974, at most 11/9 of the best packing plus a constant). O(P (log P + log capacity)),
    and a function of its arguments alone.
    """
    lengths = np.asarray(lengths, np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "piece longer than a pack, or empty"
    by_length = np.argsort(-lengths, kind="stable")
    room = _Rooms(capacity)
    with_room: dict[int, list[int]] = defaultdict(list)
    pack_of = np.empty(len(lengths), np.int64)
    packs = 0
    for piece, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        free = room.at_least(length)
        if free is None:
            pack, free = packs, capacity
            packs += 1
        else:
            pack = with_room[free].pop()
            if not with_room[free]:
                room.remove(free)
        pack_of[piece] = pack
        if left := free - length:
            if not with_room[left]:
                room.add(left)
            with_room[left].append(pack)
    order = by_length[np.argsort(pack_of[by_length], kind="stable")]
    return order, np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))]).astype(np.int64)


class _Rooms:
    """A set of integers 0..largest that finds its next member: a tree of 64-bit words.

    A bit of a word says whether the word below it has any bit set; the lowest words are the members.
    """

    def __init__(self, largest: int) -> None:
        self._levels: list[list[int]] = []
        size = largest + 1
        while True:
            size = (size + 63) // 64
            self._levels.append([0] * size)
            if size == 1:
                break

    def add(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] |= 1 << (value & 63)
            value >>= 6

    def remove(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] &= ~(1 << (value & 63))
            value >>= 6
            if level[value]:
                return

    def at_least(self, value: int) -> int | None:
        """The smallest member that is not below `value`."""
        for depth, level in enumerate(self._levels):
            if value >> 6 >= len(level):
                return None
            if word := level[value >> 6] >> (value & 63):
                value += _lowest_bit(word)
                for below in reversed(self._levels[:depth]):
                    value = (value << 6) + _lowest_bit(below[value])
                return value
            value = (value >> 6) + 1
        return None


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
