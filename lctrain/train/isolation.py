"""Whether documents of a pack can see each other under a layout: edit one, watch the others."""

from __future__ import annotations

from dataclasses import replace

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.text_batch import TextBatch
from lctrain.train.language import Language


def packed_batch(vocabulary: int, length: int) -> TextBatch:
    """One sequence of three documents of unequal (mostly odd) lengths; labels hold each position's document."""
    first, second = length // 3 | 1, length // 4 | 1
    lengths = [first, second, length - first - second]
    generator = torch.Generator().manual_seed(0)
    return TextBatch(
        input_ids=torch.randint(0, vocabulary, (1, length), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        labels=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
        documents=Documents.from_lengths(lengths),
        count=length,
        tokens=length,
    )


@torch.no_grad()
def isolation_error(language: Language, *, vocabulary: int, length: int) -> tuple[float, float]:
    """(largest change of other documents' logits, of the edited one's) when its first token is edited.

    The edited document is the first: causal attention alone would let its edit reach the later ones.
    A collective over all ranks.
    """
    batch = packed_batch(vocabulary, length)
    edited_ids = batch.input_ids.clone()
    edited_ids[0, 0] = (edited_ids[0, 0] + 1) % vocabulary
    before, document = _logits(language, batch)
    after, _ = _logits(language, replace(batch, input_ids=edited_ids))
    change = (after - before).abs().amax(-1)
    largest = [float(change[mask].max()) if mask.any() else 0.0 for mask in (document != 0, document == 0)]
    return language.mesh.max_over_all(largest[0]), language.mesh.max_over_all(largest[1])


def _logits(language: Language, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's logits [1, s, V] and the document of each of its positions [1, s]."""
    part = language.objective.shard(batch)
    with language.engine.autocast():
        logits = language.engine.module(part.input_ids, part.position_ids, None, part.documents)
    return logits.float(), part.labels
