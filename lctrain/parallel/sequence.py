"""Which columns of a batch a sequence-parallel rank works on. B sequences of S tokens."""

from __future__ import annotations

from dataclasses import replace

from lctrain.errors import ConfigError
from lctrain.ops.text_batch import TextBatch


def split_batch(batch: TextBatch, rank: int, size: int) -> TextBatch:
    """The contiguous columns [B, S / size] of `rank`; documents and count stay those of the whole batch.

    Raises ConfigError when size does not divide S.
    """
    length = batch.input_ids.shape[1]
    if length % size:
        raise ConfigError(
            f"data.max_length={length} is not a multiple of parallel.sp_size={size}; "
            f"set data.max_length to {length // size * size or size}"
        )
    width = length // size
    columns = slice(rank * width, (rank + 1) * width)
    return replace(
        batch,
        input_ids=batch.input_ids[:, columns],
        position_ids=batch.position_ids[:, columns],
        labels=batch.labels[:, columns],
    )
