"""What the data layer asks of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


class TextTokenizer(ABC):
    """Text and conversations to token ids.

    name: what error messages call it. size: largest id plus 1. bos_id, eos_id: None where the
    tokenizer has none. pad_id: any id the model's embedding holds; padding carries no loss and is
    never attended to. fingerprint: hash of the content, equal in every process and folder.
    """

    name: str
    size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    fingerprint: str

    @abstractmethod
    def tokens(self, text: str) -> np.ndarray:
        """The int32 ids of `text` alone, without the marks of a document."""

    @abstractmethod
    def encode_messages(self, messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """A conversation in the tokenizer's chat template: (ids [L] int32, loss_mask [L] bool).

        loss_mask is true on what the assistant says, its end-of-turn token included. Raises
        BadRecord for a conversation the template refuses and DataError for a template from which
        the assistant's tokens cannot be told.
        """

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write files that transformers' AutoTokenizer loads and that give equal ids for equal text."""

    def frame(self, ids: np.ndarray) -> np.ndarray:
        """A whole document: `ids` after bos and before eos, each where the tokenizer has one."""
        before = [] if self.bos_id is None else [self.bos_id]
        after = [] if self.eos_id is None else [self.eos_id]
        return np.concatenate([before, ids, after]).astype(np.int32)

    def encode(self, text: str) -> np.ndarray:
        """The int32 ids of `text` as a document of its own."""
        return self.frame(self.tokens(text))
