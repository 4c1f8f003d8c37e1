"""Where documents come from: a folder of text files, JSONL or parquet files."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lctrain.config.data import DocumentsConfig, HubConfig, JsonlConfig, ParquetConfig, RecordsConfig, TextConfig
from lctrain.data.records import BadRecord, Content, read_record
from lctrain.errors import DataError

SHARD_BYTES = 16 << 20


class Source(ABC):
    """Documents in a fixed order, in shards that processes can read apart.

    title: how messages name it, e.g. `data.path=texts`. shards: picklable, in order.
    """

    title: str
    shards: list[Any]

    @abstractmethod
    def digest(self) -> str:
        """Hash of all the content that can reach a token."""

    @abstractmethod
    def read(self, shard: Any) -> Iterator[tuple[int, Content | BadRecord]]:
        """The documents of a shard, each with its place in it; a bad record comes as the error."""

    @abstractmethod
    def place(self, shard: Any, index: int) -> str:
        """Where a document of `read` is, for people: a path below the source, with its line."""

    def full_place(self, place: str) -> str:
        """`place` as the user can open it."""
        return place


class FileSource(Source):
    """Files below a folder (links to folders are not followed), or one file; sorted by relative path."""

    def __init__(self, field: str, path: str, extensions: list[str], *, exclude: Sequence[str] = ()) -> None:
        self.title = f"{field}={path}"
        root = Path(path).expanduser()
        if root.is_file():
            self.root, self.files = root.parent, [root.name]
        elif root.is_dir():
            self.root, self.files = root, _files_below(root, tuple(extensions), exclude)
        else:
            raise DataError(f"{self.title} does not exist; give a file or a folder")
        if not self.files:
            kinds = f"whose name ends in {', '.join(extensions)}" if extensions else "at all"
            raise DataError(f"{self.title} has no file {kinds}; give another folder{self._extensions_hint()}")
        self.shards = [shard for name in self.files for shard in self.split(name)]
        if not self.shards:
            raise DataError(f"{self.title} has no documents: its files hold nothing; give a source with some text")

    def split(self, name: str) -> list[Any]:
        """The shards of one file."""
        return [name]

    def digest(self) -> str:
        """Hash of every file's relative path and bytes."""
        whole = hashlib.blake2b(digest_size=16)
        for name in self.files:
            content = hashlib.blake2b(digest_size=16)
            with open(os.path.join(self.root, name), "rb", buffering=0) as file:
                while block := file.read(1 << 20):
                    content.update(block)
            whole.update(os.fsencode(name) + b"\0" + content.digest())
        return whole.hexdigest()

    def full_place(self, place: str) -> str:
        """The path with the source's folder before it."""
        return str(self.root / place)

    def _extensions_hint(self) -> str:
        return " or data.extensions" if isinstance(self, TextSource) else ""


class TextSource(FileSource):
    """One document a file."""

    def read(self, shard: str) -> Iterator[tuple[int, Content | BadRecord]]:
        """The one document of a file; bad if it is not UTF-8, or has nothing but white space."""
        content = (self.root / shard).read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield 0, BadRecord(f"is not UTF-8 (byte {error.start}: {error.reason})")
            return
        yield 0, text if text.strip() else BadRecord("is empty: a document with no tokens")

    def place(self, shard: str, index: int) -> str:
        """The file."""
        return shard


class RecordSource(FileSource):
    """Files of records with a text or a messages field."""

    def __init__(self, field: str, path: str, extensions: list[str], *, cfg: RecordsConfig) -> None:
        self._fields = {"text_field": cfg.text_field, "messages_field": cfg.messages_field}
        super().__init__(field, path, extensions)


class JsonlSource(RecordSource):
    """A record a line; a shard is (file, first byte, end), and takes the lines that start in it."""

    def split(self, name: str) -> list[tuple[str, int, int]]:
        """Shards of about SHARD_BYTES; none for a file of blank lines."""
        with open(self.root / name, "rb") as file:
            if not any(line.strip() for line in file):
                return []
        size = (self.root / name).stat().st_size
        return [(name, start, min(start + SHARD_BYTES, size)) for start in range(0, size, SHARD_BYTES)]

    def read(self, shard: tuple[str, int, int]) -> Iterator[tuple[int, Content | BadRecord]]:
        """The records of a shard with their line within it; blank lines are none."""
        name, start, end = shard
        with open(self.root / name, "rb") as file:
            _seek_line(file, start)
            index = 0
            while file.tell() < end and (line := file.readline()):
                if line.strip():
                    yield index, read_record(line, _parsed, **self._fields)
                index += 1

    def place(self, shard: tuple[str, int, int], index: int) -> str:
        """`file:line`; the lines before the shard are counted here, where a message needs them."""
        name, start, _ = shard
        with open(self.root / name, "rb") as file:
            _seek_line(file, start)
            left, lines = file.tell(), 0
            file.seek(0)
            while left and (block := file.read(min(left, 1 << 20))):
                left -= len(block)
                lines += block.count(b"\n")
        return f"{name}:{lines + index + 1}"


class ParquetSource(RecordSource):
    """A record a row; a shard is (file, row group, rows before it)."""

    def split(self, name: str) -> list[tuple[str, int, int]]:
        """A shard a row group. Raises DataError for a file that is not parquet or lacks the columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.root / name
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is not a parquet file ({error}); give data.path a whole one") from error
        check_columns(str(path), file.schema_arrow.names, list(self._fields.values()))
        shards, before = [], 0
        for group in range(file.num_row_groups):
            shards.append((name, group, before))
            before += file.metadata.row_group(group).num_rows
        return shards if before else []

    def read(self, shard: tuple[str, int, int]) -> Iterator[tuple[int, Content | BadRecord]]:
        """The records of a row group with their row within it."""
        import pyarrow.parquet as pq

        name, group, _ = shard
        file = pq.ParquetFile(self.root / name)
        columns = [column for column in self._fields.values() if column in file.schema_arrow.names]
        index = 0
        for batch in file.iter_batches(batch_size=64, row_groups=[group], columns=columns):
            for record in batch.to_pylist():
                yield index, read_record(record, **self._fields)
                index += 1

    def place(self, shard: tuple[str, int, int], index: int) -> str:
        """`file:row`, counted from 1."""
        return f"{shard[0]}:{shard[2] + index + 1}"


def open_source(cfg: DocumentsConfig, *, field: str = "data.path", path: str | None) -> Source:
    """The source that `path`, the value of `field`, names. Raises DataError: missing, empty, unreadable."""
    if path is None:
        raise DataError(f"{field} is not set; give it the folder, file or data set with the documents")
    match cfg:
        case TextConfig():
            return TextSource(field, path, cfg.extensions, exclude=cfg.exclude)
        case JsonlConfig():
            return JsonlSource(field, path, [".jsonl"], cfg=cfg)
        case ParquetConfig():
            return ParquetSource(field, path, [".parquet"], cfg=cfg)
        case HubConfig():
            from lctrain.data.hub import HubSource  # it reads through this module's helpers

            return HubSource(field, path, cfg=cfg)
    raise AssertionError(f"no source reads {type(cfg).__name__}")


def check_columns(where: str, found: list[str], wanted: list[str]) -> None:
    """Raise DataError unless one of the `wanted` columns is in `found`."""
    if not set(found) & set(wanted):
        raise DataError(
            f"{where} has neither column `{'` nor `'.join(wanted)}` (columns: {', '.join(found)}); "
            "name yours with data.text_field or data.messages_field"
        )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecord(f"is not UTF-8 (byte {error.start} of the line: {error.reason})") from error
    except json.JSONDecodeError as error:
        raise BadRecord(f"does not parse as JSON ({error.msg} at character {error.pos + 1})") from error


def _seek_line(file: Any, start: int) -> None:
    """Go to the first line that starts at byte `start` or after."""
    file.seek(max(start - 1, 0))
    if start:
        file.readline()


def _files_below(root: Path, extensions: tuple[str, ...], exclude: Sequence[str]) -> list[str]:
    found = []
    for folder, below_it, names in os.walk(root, onerror=_unreadable):
        below_it[:] = [name for name in below_it if name not in exclude]
        below = Path(folder).relative_to(root).as_posix()
        prefix = "" if below == "." else f"{below}/"
        found += [prefix + name for name in names if not extensions or name.endswith(extensions)]
    return sorted(found)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); make the folder readable") from error
