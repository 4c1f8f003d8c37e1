"""Whole columns of a store: labels, and pixels of images kept raw, without a Python call an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lctrain.data.images.store import ImageStore
from lctrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def labels_of(store: ImageStore) -> np.ndarray:
    """The label of every image, [N] int64."""
    parts = [table["label"].to_numpy() for _, table in _tables(store)]
    return np.concatenate(parts).astype(np.int64)


class RawPixels:
    """The pixels of a store with manifest.raw_shape, in place in its mapped shards.

    Raises DataError naming a shard that holds an image of another size.
    """

    def __init__(self, store: ImageStore) -> None:
        assert store.manifest.raw_shape is not None
        self.shape = store.manifest.raw_shape
        self._parts = [
            _pixels(chunk, self.shape, path) for path, table in _tables(store) for chunk in table["image"].chunks
        ]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])[:-1]

    def image(self, index: int) -> np.ndarray:
        """One image, [H, W, C] uint8; read only."""
        part = self._part(np.array([index]))[0]
        return self._parts[part][index - self._starts[part]]

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the images `indices` [B], [B, H, W, C]."""
        out = np.empty((len(indices), *self.shape), np.uint8)
        if not len(indices):
            return out  # of the last validation batch, a rank may have nothing
        places = self._part(indices)
        order = np.argsort(places, kind="stable")
        used, firsts = np.unique(places[order], return_index=True)
        for part, rows in zip(used.tolist(), np.split(order, firsts[1:]), strict=True):
            out[rows] = self._parts[part][indices[rows] - self._starts[part]]
        return out

    def _part(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, indices, side="right") - 1


def _tables(store: ImageStore) -> list[tuple[Path, pa.Table]]:
    import pyarrow as pa

    paths = [store.folder / shard["name"] for shard in store.manifest.shards]
    return [(path, pa.ipc.open_file(pa.memory_map(str(path))).read_all()) for path in paths]


def _pixels(chunk: pa.LargeBinaryArray, shape: tuple[int, int, int], path: Path) -> np.ndarray:
    _, offsets, data = chunk.buffers()
    ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    size = int(np.prod(shape))
    if (np.diff(ends) != size).any():
        raise DataError(
            f"{path} holds an image that is not {size:,} bytes, though its manifest says {shape}; remove that file and "
            "run python -m lctrain stage again"
        )
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].reshape(-1, *shape)
