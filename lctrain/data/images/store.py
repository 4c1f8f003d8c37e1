"""Staged images: memory-mapped Arrow shards with a manifest."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lctrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json of a staged split says.

    source: where it came from. classes: names by label. channels: of the pixels (1 or 3). raw_shape: (H, W, C) when
    images are kept as uint8 pixels (idx files), None when they are encoded files. shards: of each its name, rows,
    bytes and sha256, and how it was made (images.shards.Shard). skipped, skipped_places: images left out because
    they cannot be decoded, and the first of them. remote_bytes, source_bytes: read from the source, and what the
    source holds: their ratio is the read amplification of staging. fingerprint: equal for equal images in an equal
    order. listing: digest of the source's listing when it was copied.
    """

    source: str
    classes: list[str]
    channels: int
    raw_shape: tuple[int, int, int] | None
    shards: list[dict[str, Any]]
    skipped: int
    skipped_places: list[str]
    remote_bytes: int
    source_bytes: int
    fingerprint: str
    listing: str = ""

    @property
    def read_amplification(self) -> float:
        """Bytes read from the source while staging over the bytes it holds."""
        return self.remote_bytes / max(self.source_bytes, 1)


class ImageStore:
    """The images of one split, read in place from memory-mapped shards; safe to read from several processes.

    Columns of a shard: image (large_binary), label (int32), name (string). remote_bytes: what this process read from
    the source to have them; 0 when they were staged before.
    Raises DataError for a manifest that cannot be read, and for a shard that is not whole in size.
    """

    def __init__(self, folder: Path, *, remote_bytes: int = 0) -> None:
        self.folder = folder
        self.remote_bytes = remote_bytes
        self.manifest = read_manifest(folder)
        self._parts: list[_Part] | None = None
        self._ends: list[int] = []

    def __len__(self) -> int:
        return sum(shard["rows"] for shard in self.manifest.shards)

    @property
    def key(self) -> str:
        """Names these images in the cache: see prepare.open_images."""
        return self.folder.name

    @property
    def fingerprint(self) -> str:
        """Equal for equal images in an equal order."""
        return self.manifest.fingerprint

    @property
    def summary(self) -> str:
        """One line for people."""
        size = sum(shard["bytes"] for shard in self.manifest.shards)
        return f"{len(self):,} images of {len(self.manifest.classes):,} classes, {size / 2**20:,.1f} MiB"

    def image(self, index: int) -> memoryview:
        """The encoded file, or H * W * C uint8 pixels where manifest.raw_shape is set; nothing is copied."""
        part, row = self._place(index)
        return part.images[part.offsets[row] : part.offsets[row + 1]]

    def label(self, index: int) -> int:
        """The class of image `index`, from 0."""
        part, row = self._place(index)
        return int(part.labels[row])

    def name(self, index: int) -> str:
        """Where image `index` came from, for people."""
        part, row = self._place(index)
        return str(part.names[row].as_py())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": None}  # a worker maps the files itself

    def _place(self, index: int) -> tuple[_Part, int]:
        if self._parts is None:
            parts = [part for shard in self.manifest.shards for part in _map(self.folder / shard["name"])]
            self._ends = list(accumulate(len(part.labels) for part in parts))
            self._parts = parts
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


@dataclass(frozen=True)
class _Part:
    """A record batch in its mapped file: through Arrow's own scalars each image would take ten times as long."""

    images: memoryview
    offsets: np.ndarray
    labels: np.ndarray
    names: pa.StringArray


def _map(path: Path) -> Iterator[_Part]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        images, labels, names = (batch.column(name) for name in ("image", "label", "name"))
        _, offsets, data = images.buffers()
        yield _Part(memoryview(data), np.frombuffer(offsets, np.int64), labels.to_numpy(), names)


def parse_manifest(folder: Path) -> Manifest:
    """The manifest of a staged split, whatever the shards are like. Raises DataError when it cannot be read."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        raw = fields.pop("raw_shape")
        return Manifest(raw_shape=tuple(raw) if raw else None, **fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove {folder} and stage the images again") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a staged split; checks that shards are there and whole in size.

    Raises DataError naming the shard that is not.
    """
    manifest = parse_manifest(folder)
    for shard in manifest.shards:
        file = folder / shard["name"]
        size = file.stat().st_size if file.is_file() else 0
        if size != shard["bytes"]:
            raise DataError(
                f"{file} has {size:,} bytes but {shard['bytes']:,} were written (sha256 {shard['sha256']}); run python "
                "-m lctrain stage again with the same data.source and data.cache: it copies only what is damaged"
            )
    return manifest
