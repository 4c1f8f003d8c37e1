"""The tokens of all documents, memory-mapped from Arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

IDS = np.dtype("<i4")


class TokenTable:
    """Random access to the rows that tokenise.py wrote; a row without tokens is a skipped record."""

    def __init__(self, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self._table = pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])
        self._ids = [_Blobs(chunk, IDS) for chunk in self._table.column("input_ids").chunks]
        masked = "loss_mask" in self._table.column_names
        self._masks = [_Blobs(chunk, bool) for chunk in self._table.column("loss_mask").chunks] if masked else None
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._ids)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, [rows] int64."""
        return np.concatenate([chunk.lengths for chunk in self._ids])

    @property
    def identities(self) -> np.ndarray:
        """Hash of each row's tokens, [rows] int64."""
        return self._table.column("identity").to_numpy()

    def problems(self) -> list[str]:
        """Why each skipped record was, with its place."""
        return self._table.column("problem").drop_null().to_pylist()

    def ids(self, row: int, start: int, end: int) -> np.ndarray:
        """Tokens start to end of a row, int32, not copied."""
        chunk, within = self._find(row)
        return self._ids[chunk].items(within, start, end)

    def loss_mask(self, row: int, start: int, end: int) -> np.ndarray | None:
        """Which of those tokens carry loss; None where all do."""
        if self._masks is None:
            return None
        chunk, within = self._find(row)
        blobs = self._masks[chunk]
        # A null, like an empty document, has no bytes; and an empty document is never asked for.
        return None if blobs.empty(within) else blobs.items(within, start, end)

    def _find(self, row: int) -> tuple[int, int]:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        return chunk, row - int(self._starts[chunk])


class _Blobs:
    """NumPy arrays kept in a large_binary Arrow array."""

    def __init__(self, array: Any, dtype: Any) -> None:
        _, offsets, data = array.buffers()
        self._dtype = np.dtype(dtype)
        self._offsets = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        self._data = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets) // self._dtype.itemsize

    def empty(self, row: int) -> bool:
        return bool(self._offsets[row] == self._offsets[row + 1])

    def items(self, row: int, start: int, end: int) -> np.ndarray:
        begin, size = self._offsets[row], self._dtype.itemsize
        return self._data[begin + start * size : begin + end * size].view(self._dtype)
