"""Zigzag index arithmetic against a brute-force count of visible (query, key) pairs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lctrain.ops.attention.documents import Documents
from lctrain.parallel.zigzag import (
    causal_work,
    chunk_starts,
    local_documents,
    prefix_rectangles,
    ring_rectangles,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Documents, int, int]:
    """(documents, rows, ranks): every row starts a document."""
    size = draw(st.integers(1, 4))
    chunk = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 3))
    length = 2 * size * chunk
    bounds = {0}
    for row in range(rows):
        bounds.add((row + 1) * length)
        bounds |= {row * length + b for b in draw(st.sets(st.integers(1, length - 1), max_size=6))}
    return Documents(tuple(sorted(bounds))), rows, size


def columns(length: int, rank: int, size: int) -> list[int]:
    """Columns of a rank in local order."""
    chunk = length // (2 * size)
    return [first + i for first in chunk_starts(length, rank, size) for i in range(chunk)]


def visible(documents: Documents, query: int, key: int) -> bool:
    """Whether a query may see a key: not later, and in the same document."""
    return key <= query and any(start <= key and query < end for start, end in documents.spans())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ring_blocks_cover_each_visible_pair_once(case: tuple[Documents, int, int]) -> None:
    documents, rows, size = case
    length = documents.total // rows
    work = []
    for rank in range(size):
        mine = [row * length + c for row in range(rows) for c in columns(length, rank, size)]
        covered: list[tuple[int, int]] = []
        for start, end in local_documents(documents, rows, rank, size).spans():
            covered += [(mine[q], mine[k]) for q in range(start, end) for k in range(start, q + 1)]
        for source in range(size):
            theirs = [row * length + c for row in range(rows) for c in columns(length, source, size)]
            for r in ring_rectangles(documents, rows, rank, source, size):
                covered += [(mine[q], theirs[k]) for q in range(r.q_start, r.q_end) for k in range(r.k_start, r.k_end)]
        wanted = {(q, k) for q in mine for k in range(documents.total) if visible(documents, q, k)}
        assert len(covered) == len(set(covered))
        assert set(covered) == wanted
        assert causal_work(documents, rows, rank, size) == len(wanted)
        work.append(len(wanted))
    assert sum(work) == documents.causal_pairs


@settings(max_examples=100, deadline=None)
@given(cases())
def test_prefix_blocks_cover_what_the_triangles_do_not(case: tuple[Documents, int, int]) -> None:
    documents, rows, size = case
    length = documents.total // rows
    for rank in range(size):
        mine = [row * length + c for row in range(rows) for c in columns(length, rank, size)]
        covered: list[tuple[int, int]] = []
        for start, end in local_documents(documents, rows, rank, size).spans():
            covered += [(mine[q], mine[k]) for q in range(start, end) for k in range(start, q + 1)]
        for part in prefix_rectangles(documents, rows, rank, size):
            covered += [
                (mine[q], k) for r in part for q in range(r.q_start, r.q_end) for k in range(r.k_start, r.k_end)
            ]
        assert len(covered) == len(set(covered))
        assert set(covered) == {(q, k) for q in mine for k in range(documents.total) if visible(documents, q, k)}


def test_one_document_is_balanced() -> None:
    documents = Documents((0, 4096))
    work = [causal_work(documents, 1, rank, 4) for rank in range(4)]
    assert max(work) / min(work) < 1.001
