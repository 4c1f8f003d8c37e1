"""Packed documents never see each other, bit for bit, whatever splits the sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config

# Rows of (7, 13, 28) and (31, 17) tokens; the edit is in the first document of each.
LENGTHS = ((7, 13, 28), (31, 17))
EDITS = (3, 16)


def _logits(ranks: Any, plain: dict[str, Any], edited: bool) -> tuple[np.ndarray, np.ndarray]:
    """(columns, logits [B, columns, V]) of this rank."""
    from dataclasses import replace

    import torch

    from lctrain.data.collate import collate
    from lctrain.data.pieces import piece_of
    from tests.support.run import build

    _, language = build(ranks, plain)
    rng = np.random.default_rng(5)
    rows = [[piece_of(rng.integers(0, 97, n).astype(np.int32)) for n in lengths] for lengths in LENGTHS]
    batch = collate(rows, pad_id=0, multiple=language.mesh.sizes.length_multiple)
    if edited:
        for row, column in enumerate(EDITS):
            batch.input_ids[row, column] = (batch.input_ids[row, column] + 1) % 97
    # Split along with the tokens, the column numbers say which ones a rank holds.
    numbers = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    own = language.objective.shard(replace(batch, labels=numbers))
    with torch.no_grad():
        logits = language.model.logits(own.input_ids, own.position_ids, own.documents)
    return own.labels[0].numpy(), logits.numpy()


def whole(size: int, plain: dict[str, Any], *, edited: bool) -> np.ndarray:
    """Logits [B, S, V] put together from the ranks' columns."""
    parts = pool(size).run(_logits, plain=plain, edited=edited)
    columns = np.concatenate([c for c, _ in parts])
    logits = np.concatenate([x for _, x in parts], axis=1)
    # Data ranks hold every column each: the first copy of each column will do.
    _, first = np.unique(columns, return_index=True)
    return logits[:, first]


LAYOUTS = [
    (1, ["parallel=single"]),
    (1, ["parallel=single", "memory=full", "model.attention=reference"]),
    (2, ["parallel=ddp"]),
    (2, ["parallel=fsdp"]),
    (2, ["parallel=fsdp_sp"]),
    (2, ["parallel=fsdp_sp", "memory=full"]),
    (2, ["parallel=fsdp_cp"]),
    (2, ["parallel=fsdp_cp", "parallel.cp_method=allgather"]),
    (4, ["parallel=fsdp_usp", "parallel.sp_size=2"]),
]


@pytest.mark.parametrize(("size", "overrides"), LAYOUTS, ids=lambda x: ",".join(x) if isinstance(x, list) else str(x))
def test_editing_one_document_changes_no_bit_of_another(size: int, overrides: list[str]) -> None:
    plain = to_plain(tiny_config(*overrides, f"launch.nproc_per_node={size}"))
    before, after = (whole(size, plain, edited=edited) for edited in (False, True))
    reference = whole(1, to_plain(tiny_config("parallel=single")), edited=False)
    assert before.shape[1] == 48
    np.testing.assert_allclose(before, reference, rtol=1e-3, atol=1e-4)
    for row, (column, lengths) in enumerate(zip(EDITS, LENGTHS, strict=True)):
        end = lengths[0]
        assert np.array_equal(before[row, :column], after[row, :column])  # causal
        assert not np.array_equal(before[row, column:end], after[row, column:end])
        assert np.array_equal(before[row, end:], after[row, end:])  # isolated
