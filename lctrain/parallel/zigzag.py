"""Index arithmetic of zigzag context parallelism: who holds which columns, who attends to what.

A sequence of S columns is cut into 2n chunks of c = S / 2n; rank r of n holds chunks r and 2n-1-r, in
that order, so that causal work is the same on every rank. Documents are contiguous, so between two
different chunks at most one document crosses: the keys of another rank that a rank's queries may see
are always one rectangle, a contiguous run of local queries against a contiguous run of local keys.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from lctrain.ops.attention.documents import Documents


@dataclass(frozen=True)
class Rectangle:
    """Queries [q_start, q_end) see all keys [k_start, k_end). Row indices of the flattened local batch [B * 2c]."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


def chunk_starts(length: int, rank: int, size: int) -> tuple[int, int]:
    """First columns of the two chunks `rank` holds."""
    chunk = length // (2 * size)
    return rank * chunk, (2 * size - 1 - rank) * chunk


@lru_cache(maxsize=256)
def local_documents(documents: Documents, rows: int, rank: int, size: int) -> Documents:
    """Boundaries of the parts of documents that lie in this rank's chunks, over its flattened [B * 2c]."""
    length = documents.total // rows
    chunk = length // (2 * size)
    bounds = {0}
    for row in range(rows):
        for part, first in enumerate(chunk_starts(length, rank, size)):
            base, start = row * 2 * chunk + part * chunk, row * length + first
            bounds.add(base)
            inside = documents.cu_seqlens[
                bisect_right(documents.cu_seqlens, start) : bisect_right(documents.cu_seqlens, start + chunk - 1)
            ]
            bounds.update(base + b - start for b in inside)
    return Documents((*sorted(bounds), rows * 2 * chunk))


@lru_cache(maxsize=1024)
def ring_rectangles(documents: Documents, rows: int, rank: int, source: int, size: int) -> tuple[Rectangle, ...]:
    """What queries of `rank` see of the keys of `source` beyond causal triangles; one rectangle a row at most."""
    length = documents.total // rows
    chunk = length // (2 * size)
    found = []
    for row in range(rows):
        if rectangle := _rectangle(documents, row * length, length, rank, source, size):
            base = row * 2 * chunk
            q0, q1, k0, k1 = rectangle
            found.append(Rectangle(base + q0, base + q1, base + k0, base + k1))
    return tuple(found)


def _rectangle(
    documents: Documents, row_start: int, length: int, rank: int, source: int, size: int
) -> tuple[int, int, int, int] | None:
    """(q start, q end, k start, k end) in local columns [0, 2c) of one row, or None."""
    chunk = length // (2 * size)
    early, late = chunk_starts(length, rank, size)
    source_early, source_late = chunk_starts(length, source, size)
    # Of an earlier rank only its early chunk is visible, to both of ours; else only our late chunk sees anything.
    first_query = early if source < rank else late
    start, end = _document_at(documents, row_start, first_query)
    if source < rank:
        queries = (0, min(end - early, chunk) + max(0, min(end - late, chunk)))
        keys = (max(0, start - source_early), chunk)
    else:
        queries = (chunk, chunk + min(end - late, chunk))
        # Ours: the early chunk only (the late one is the causal triangle). A later rank's: both of its chunks.
        last_key = chunk if source == rank else 2 * chunk
        if start < source_early + chunk:
            keys = (max(0, start - source_early), last_key)
        else:
            keys = (chunk + max(0, start - source_late), last_key)
    return (*queries, *keys) if keys[0] < keys[1] else None


def prefix_rectangles(documents: Documents, rows: int, rank: int, size: int) -> tuple[tuple[Rectangle, ...], ...]:
    """For each of the rank's two chunks: queries against their document's earlier keys, wherever those are held.

    Query rows count in the local [B * 2c]; key rows in the whole [B * S].
    """
    length = documents.total // rows
    chunk = length // (2 * size)
    parts: list[tuple[Rectangle, ...]] = []
    for part, first in enumerate(chunk_starts(length, rank, size)):
        found = []
        for row in range(rows):
            start, end = _document_at(documents, row * length, first)
            if start < first:
                q = row * 2 * chunk + part * chunk
                found.append(Rectangle(q, q + min(end - first, chunk), row * length + start, row * length + first))
        parts.append(tuple(found))
    return tuple(parts)


def _document_at(documents: Documents, row_start: int, column: int) -> tuple[int, int]:
    """Columns [start, end) of the document that holds `column` of a row."""
    index = bisect_right(documents.cu_seqlens, row_start + column)
    return documents.cu_seqlens[index - 1] - row_start, documents.cu_seqlens[index] - row_start


def causal_work(documents: Documents, rows: int, rank: int, size: int) -> int:
    """(query, key) pairs `rank` computes."""
    own = local_documents(documents, rows, rank, size).causal_pairs
    return own + sum(
        (r.q_end - r.q_start) * (r.k_end - r.k_start)
        for source in range(size)
        for r in ring_rectangles(documents, rows, rank, source, size)
    )
