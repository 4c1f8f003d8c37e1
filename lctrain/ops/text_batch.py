"""The batch the language objective trains on. B sequences of S tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lctrain.ops.attention.documents import Documents

if TYPE_CHECKING:
    import torch

IGNORE = -100


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch of one data rank.

    input_ids, position_ids, labels: [B, S] int64, or the rank's own [B, S / sp] columns after a
    sequence split. Positions restart in every document. labels[b, t] is the token that follows
    position t in the same document, IGNORE where there is none or it carries no loss: labels are
    shifted before any split, so no shard ever needs its neighbour's first token.
    documents: boundaries of the whole unsplit [B * S] batch, on every rank.
    count: labels of the whole unsplit batch that are not IGNORE. tokens: its tokens that are not padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents
    count: int
    tokens: int

    def to(self, device: torch.device) -> TextBatch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )
