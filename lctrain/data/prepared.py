"""Tokenised documents laid out in sequences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lctrain.data.pieces import Piece, piece_of
from lctrain.data.plan import Plan
from lctrain.data.table import TokenTable
from lctrain.data.text_tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The sequences of one split, read from memory-mapped files; safe to read from several threads.

    key: names the tokens in the cache. skipped: bad records left out of the whole source.
    skipped_places: the first few of them, each with its file, line and reason.
    """

    table: TokenTable
    plan: Plan
    tokenizer: TextTokenizer
    key: str
    skipped: int
    skipped_places: list[str]

    def __len__(self) -> int:
        return len(self.plan.offsets) - 1

    @property
    def documents(self) -> int:
        """Documents of this split."""
        return self.plan.documents

    @property
    def tokens(self) -> int:
        """Tokens of this split, the marks of documents included."""
        return self.plan.tokens

    @property
    def pad_id(self) -> int:
        """The token that fills rows up."""
        return self.tokenizer.pad_id

    @property
    def fingerprint(self) -> str:
        """Equal for equal sequences in an equal order: tokens, split, max_length and packing."""
        return hashlib.blake2b(f"{self.key}:{self.plan.key}".encode(), digest_size=16).hexdigest()

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{self.documents:,} documents, {self.tokens:,} tokens in {len(self):,} sequences"

    def sample(self, index: int) -> list[Piece]:
        """The pieces of sequence `index`."""
        first, last = self.plan.offsets[index], self.plan.offsets[index + 1]
        return [self._piece(*(int(number) for number in piece[:3])) for piece in self.plan.pieces[first:last]]

    def _piece(self, row: int, start: int, end: int) -> Piece:
        ids, mask = self.table.ids(row, start, end), self.table.loss_mask(row, start, end)
        if end == self.table.lengths[row]:
            return piece_of(ids, mask)
        following = int(self.table.ids(row, end, end + 1)[0])
        trained = self.table.loss_mask(row, end, end + 1)
        return piece_of(ids, mask, following=following if trained is None or trained[0] else None)
