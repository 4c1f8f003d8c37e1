"""Writing shards of images, whole or not at all, and checking them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lctrain.data.images.sources import START, Cursor

SHARD_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
PLACES_KEPT = 100


@dataclass(kw_only=True)
class Shard:
    """One file of images. begin, end: its part of the source. skipped, places: images in it that cannot be decoded.

    bytes, sha256: of the file. content: hash of the labels and images in it, whatever wrote the file.
    read: bytes read from the source for it. found: see ClassNames.found, at its end. relabelled: its labels follow
    the sorted class names.
    """

    name: str
    begin: Cursor = START
    end: Cursor = START
    rows: int = 0
    bytes: int = 0
    sha256: str = ""
    content: str = ""
    skipped: int = 0
    places: list[str] = field(default_factory=list)
    read: int = 0
    found: list[str] | int = 0
    relabelled: bool = False

    def __post_init__(self) -> None:
        # JSON has lists only.
        self.begin = (self.begin[0], self.begin[1])
        self.end = (self.end[0], self.end[1])

    def skip(self, place: str) -> None:
        """Count an image that is left out."""
        self.skipped += 1
        if len(self.places) < PLACES_KEPT:
            self.places.append(place)


def shard_name(number: int) -> str:
    """The file of shard `number`."""
    return f"images-{number:05d}.arrow"


class ShardWriter:
    """Fills one shard: `NAME.partial`, renamed when it is whole and on the disk."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        import pyarrow as pa

        self.shard, self._path = shard, folder / shard.name
        self._partial = partial_of(self._path)
        self._schema = pa.schema([("image", pa.large_binary()), ("label", pa.int32()), ("name", pa.string())])
        self._file = _HashedFile(self._partial)
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._file, "w"), self._schema)
        self._content = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[bytes, int, str]] = []
        self._waiting = 0
        self.image_bytes = 0

    def add(self, image: bytes, label: int, name: str, *, digest: bytes) -> None:
        """One image. digest: a hash of `image`."""
        self._content.update(label.to_bytes(4, "little") + digest)
        self._rows.append((image, label, name))
        self._waiting += len(image)
        self.image_bytes += len(image)
        self.shard.rows += 1
        if self._waiting >= BATCH_BYTES:
            self._flush()

    @property
    def content(self) -> str:
        """See Shard."""
        return self._content.hexdigest()

    def finish(self) -> Shard:
        """Close, make durable and rename the file; the shard with its sizes and sums."""
        if self._rows:
            self._flush()
        self._arrow.close()
        self._file.finish()
        self.shard.bytes, self.shard.sha256 = self._file.size, self._file.hash.hexdigest()
        self.shard.content = self.content
        self._partial.rename(self._path)
        return self.shard

    def abandon(self) -> None:
        """Close the file and leave it as it is: the next copy removes it."""
        self._file.close()

    def remove(self) -> None:
        """Close the file and take it away: there is nothing to put into it."""
        self._file.close()
        self._partial.unlink()

    def _flush(self) -> None:
        import pyarrow as pa

        images, labels, names = zip(*self._rows, strict=True)
        arrays = [
            pa.array(column, kind) for column, kind in zip((images, labels, names), self._schema.types, strict=True)
        ]
        self._arrow.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._rows, self._waiting = [], 0


class _HashedFile:
    """A file that is written once, from front to back, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 -- closed by finish or close
        self.hash, self.size = hashlib.sha256(), 0
        self.closed = False

    def write(self, block: Any) -> int:
        self.hash.update(block)
        self.size += len(block)
        return self._file.write(block)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()
        self.closed = True


def partial_of(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f"{path.name}.partial")


def is_whole(folder: Path, shard: Shard, *, checksum: bool) -> bool:
    """Whether the file is there with the right size, and the right sha256 too with `checksum`."""
    path = folder / shard.name
    if not path.is_file() or path.stat().st_size != shard.bytes:
        return False
    if not checksum:
        return True
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest() == shard.sha256


def relabel(folder: Path, shard: Shard, order: list[int]) -> Shard:
    """Write a shard again with label order[l] for every label l."""
    import pyarrow as pa

    writer = ShardWriter(folder, Shard(**{**asdict(shard), "rows": 0, "relabelled": True}))
    with pa.memory_map(str(folder / shard.name)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            columns = reader.get_batch(number).columns
            for image, label, name in zip(*(column.to_pylist() for column in columns), strict=True):
                writer.add(image, order[label], name, digest=image_digest(image))
    return writer.finish()


def image_digest(image: bytes) -> bytes:
    """The hash of an image that `Shard.content` is made of."""
    return hashlib.sha256(image).digest()  # faster than others where the processor helps


def write_json(path: Path, value: Any) -> None:
    """Write a small file whole or not at all."""
    partial_of(path).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    partial_of(path).rename(path)
