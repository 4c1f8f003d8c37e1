"""Images in Parquet or Arrow files, a row each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from lctrain.data.images.sources import Cursor, FilesSource, Item, Split, read_class_names, split_files
from lctrain.data.images.storage import Entry, Storage
from lctrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = (".parquet", ".arrow")
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class", "target")
ROWS = 64
ARROW_BLOCK = 1 << 20


class TableSource(FilesSource):
    """Files in the order of their names. A cursor is (number of the file, row in it).

    The image column holds bytes, or the {bytes, path} of Hugging Face; labels are numbers or class names.
    Raises DataError for a file that cannot be read, or without those columns.
    """

    def __init__(self, storage: Storage, entries: list[Entry]) -> None:
        super().__init__(storage, entries)
        self._first = self._open(entries[0])  # kept, for its end was read
        schema = self._schema()
        where = f"{storage.title}: {entries[0].path}"
        self._image = pick(where, "an image", schema.names, IMAGE_COLUMNS)
        self._label = pick(where, "a label", schema.names, LABEL_COLUMNS)
        self.classes = read_class_names(storage) or _noted_classes(schema, self._label)

    def read(self, start: Cursor) -> Iterator[Item]:
        """See ImageSource."""
        for number in range(start[0], len(self.entries)):
            row = start[1] if number == start[0] else 0
            for batch in self._batches(number, row):
                for record in batch.select([self._image, self._label]).to_pylist():
                    place = f"{self.entries[number].path}:{row + 1}"
                    data = image_bytes(self.title, place, record[self._image])
                    label = given_label(self.title, place, record[self._label])
                    row += 1
                    yield Item(place, label, partial(bytes, data), (number, row))

    def _batches(self, number: int, row: int) -> Iterator[pa.RecordBatch]:
        """The rows of a file from `row` on."""
        import pyarrow as pa

        entry = self.entries[number]
        read = _parquet_batches if entry.path.lower().endswith(".parquet") else _arrow_batches
        try:
            file = self._open(entry) if number else self._first
            yield from read(file, row, [self._image, self._label])
        except (pa.ArrowException, KeyError, OSError) as error:
            raise self._unreadable(entry, error) from error

    def _open(self, entry: Entry) -> Any:
        """Parquet's reader asks for whole columns, Arrow's for many small pieces."""
        return self.storage.open(entry, block=0 if entry.path.lower().endswith(".parquet") else ARROW_BLOCK)

    def _schema(self) -> pa.Schema:
        import pyarrow as pa
        import pyarrow.parquet as pq

        entry = self.entries[0]
        try:
            if entry.path.lower().endswith(".parquet"):
                return pq.ParquetFile(self._first).schema_arrow
            return _open_arrow(self._first).schema
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(entry, error) from error

    def _unreadable(self, entry: Entry, error: Exception) -> DataError:
        return DataError(
            f"{self.title}: {entry.path} cannot be read as a whole file with columns like the first one's ({error}); "
            "copy or write it again"
        )


def open_tables(storage: Storage, split: Split, *, own: bool) -> TableSource | None:
    """The files of a split; None when evaluation has none. Raises DataError when training has none."""
    entries = [entry for entry in storage.walk() if entry.path.lower().endswith(TABLES)]
    if not entries:
        raise DataError(f"{storage.title} has no {', '.join(TABLES)} files; give their folder, or another data.format")
    chosen = split_files(entries, split, own=own)
    return TableSource(storage, chosen) if chosen else None


def pick(where: str, what: str, names: list[str], wanted: tuple[str, ...]) -> str:
    """The first of the `wanted` columns that is among `names`. Raises DataError when none is."""
    for name in wanted:
        if name in names:
            return name
    raise DataError(
        f"{where} has no column for {what}: looked for {', '.join(wanted)}; found {', '.join(names)}; rename yours"
    )


def image_bytes(title: str, place: str, value: Any) -> bytes:
    """The encoded image in a cell. Raises DataError when it holds none."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        raise DataError(f"{title}: {place} holds no image bytes; write the images themselves into the table")
    return data


def given_label(title: str, place: str, value: Any) -> int | str:
    """The label in a cell. Raises DataError when it is neither a whole number nor a name."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise DataError(f"{title}: {place} has label {value}, outside its classes: neither a whole number nor a name")
    return value


def _noted_classes(schema: pa.Schema, label: str) -> list[str] | None:
    """The names Hugging Face's writer notes in the file."""
    noted = (schema.metadata or {}).get(b"huggingface")
    if noted is None:
        return None
    feature = json.loads(noted).get("info", {}).get("features", {}).get(label, {})
    names = feature.get("names")
    return list(names) if feature.get("_type") == "ClassLabel" and names else None


def _parquet_batches(file: Any, row: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row >= rows:
            row -= rows
            continue
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=columns):
            yield batch.slice(min(row, len(batch)))
            row = max(row - len(batch), 0)


def _arrow_batches(file: Any, row: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in _open_arrow(file):
        for first in range(0, len(batch), ROWS):
            part = batch.slice(first, ROWS).select(columns)
            yield part.slice(min(row, len(part)))
            row = max(row - len(part), 0)


def _open_arrow(file: Any) -> Any:
    """The batches of an Arrow file, of the stream format too, which Hugging Face writes."""
    import pyarrow as pa

    file.seek(0)
    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        return pa.ipc.open_stream(file)
    return _FileBatches(reader)


class _FileBatches:
    """A file's reader that iterates as a stream's does."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.schema = reader, reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return (self._reader.get_batch(number) for number in range(self._reader.num_record_batches))
