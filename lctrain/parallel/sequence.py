"""Which columns of a batch a sequence-parallel rank works on. B sequences of S tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from lctrain.errors import ConfigError
from lctrain.ops.text_batch import TextBatch
from lctrain.parallel.zigzag import chunk_starts


def split_batch(batch: TextBatch, sp_rank: int, sp_size: int, *, cp_rank: int = 0, cp_size: int = 1) -> TextBatch:
    """This rank's columns [B, S / (cp * sp)]; documents and count stay those of the whole batch.

    A cp rank holds two zigzag chunks (parallel/zigzag.py), one after the other; sp ranks hold contiguous
    parts of what their cp rank holds.
    Raises ConfigError when S does not divide.
    """
    length = batch.input_ids.shape[1]
    multiple = sp_size * (2 * cp_size if cp_size > 1 else 1)
    if length % multiple:
        sizes = f"parallel.sp_size={sp_size}" + (f" x 2 x parallel.cp_size={cp_size}" if cp_size > 1 else "")
        raise ConfigError(
            f"data.max_length={length} is not a multiple of {sizes}; "
            f"set data.max_length to {length // multiple * multiple or multiple}"
        )
    return replace(
        batch,
        input_ids=_columns(batch.input_ids, sp_rank, sp_size, cp_rank, cp_size),
        position_ids=_columns(batch.position_ids, sp_rank, sp_size, cp_rank, cp_size),
        labels=_columns(batch.labels, sp_rank, sp_size, cp_rank, cp_size),
    )


def _columns(x_BS: torch.Tensor, sp_rank: int, sp_size: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    if cp_size > 1:
        chunk = x_BS.shape[1] // (2 * cp_size)
        starts = chunk_starts(x_BS.shape[1], cp_rank, cp_size)
        x_BS = torch.cat([x_BS[:, start : start + chunk] for start in starts], dim=1)
    width = x_BS.shape[1] // sp_size
    return x_BS[:, sp_rank * width : (sp_rank + 1) * width]
