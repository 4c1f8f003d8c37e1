"""Document boundaries of a batch, as host integers built once by the collator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Documents:
    """Where documents start and end in a batch flattened to [B * S] tokens.

    cu_seqlens: cumulative lengths with the leading 0; the last entry is B * S. Every row of the
    batch starts a document, and every token belongs to exactly one (padding is a document too).
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.cu_seqlens[0] == 0, self.cu_seqlens[:4]
        assert all(a < b for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)), "empty document"

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Documents:
        """Build from document lengths in order; zero lengths are dropped."""
        bounds = [0]
        for length in lengths:
            if length:
                bounds.append(bounds[-1] + length)
        return cls(tuple(bounds))

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each document."""
        return zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def total(self) -> int:
        """Tokens in all documents, B * S."""
        return self.cu_seqlens[-1]

    @cached_property
    def max_length(self) -> int:
        """Length of the longest document."""
        return max(end - start for start, end in self.spans())

    @cached_property
    def causal_pairs(self) -> int:
        """(query, key) pairs that causal attention inside documents computes: sum of L (L + 1) / 2."""
        return sum((end - start) * (end - start + 1) // 2 for start, end in self.spans())
