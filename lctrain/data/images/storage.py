"""Where a source's files lie: listing them and reading their bytes, counted."""

from __future__ import annotations

import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lctrain.errors import DataError

SIGNED_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A file. path: below the storage's root, with `/`. size: bytes. tag: changes when the content does."""

    path: str
    size: int
    tag: str

    @property
    def order(self) -> tuple[str, ...]:
        """Sorts by folder names, then by file name."""
        return tuple(self.path.split("/"))


class Counter:
    """Bytes read, counted from several threads."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        with self._lock:
            self.total += count
        if self is not _EVERYTHING:
            _EVERYTHING.add(count)


_EVERYTHING = Counter()


def source_bytes() -> int:
    """Bytes this process has read from sources of any kind since it began."""
    return _EVERYTHING.total


class Storage(ABC):
    """A folder or one file, here or in an object store; read from several threads.

    title: how messages name it, e.g. `data.source=photos`; never with credentials. name: of the source, for file
    names. counter: bytes read so far, also by storages `below`. readers: threads that keep it busy.
    """

    title: str
    name: str
    counter: Counter
    readers: int

    @abstractmethod
    def children(self) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files right below, each sorted; hidden ones are left out."""

    @abstractmethod
    def below(self, name: str) -> Storage:
        """The folder `name`."""

    @abstractmethod
    def walk(self) -> list[Entry]:
        """Every file below that is not hidden, in order."""

    @abstractmethod
    def read(self, entry: Entry, start: int = 0, end: int | None = None) -> bytes:
        """Bytes start to end of a file, all of them if possible. Raises DataError when they cannot be had."""

    def open(self, entry: Entry, *, block: int) -> io.BufferedIOBase:
        """A file to read and seek in; reads of less than `block` bytes fetch that many."""
        return RangeFile(self, entry, block=block)


class RangeFile(io.BufferedIOBase):
    """A file read in ranges; keeps the last one."""

    def __init__(self, storage: Storage, entry: Entry, *, block: int) -> None:
        self._storage, self._entry, self._block = storage, entry, block
        self._at = 0
        self._kept_at, self._kept = 0, b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The byte read next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As io.IOBase.seek."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """As io.BufferedIOBase.read."""
        left = max(self._entry.size - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        first = self._at - self._kept_at
        found = self._kept[first : first + wanted] if 0 <= first <= len(self._kept) else b""
        if len(found) < wanted:
            start = self._at + len(found)
            end = min(max(self._at + wanted, start + self._block), self._entry.size)
            self._kept_at, self._kept = start, self._storage.read(self._entry, start, end)
            found += self._kept[: wanted - len(found)]
        self._at += len(found)
        return found


class LocalStorage(Storage):
    """A local folder, or one local file; links are followed."""

    def __init__(self, title: str, path: Path, counter: Counter | None = None) -> None:
        self.title, self.name, self.counter = title, path.name, counter or Counter()
        self.readers = min(os.cpu_count() or 1, 8)
        self._only = path.name if path.is_file() else None
        self._root = path if self._only is None else path.parent

    @property
    def folder(self) -> Path:
        """The folder, for libraries that open it themselves."""
        return self._root

    def children(self) -> tuple[list[str], list[str]]:
        """See Storage."""
        if self._only is not None:
            return [], [self._only]
        with _reading(), os.scandir(self._root) as found:
            seen = [(e.name, e.is_dir()) for e in found if not e.name.startswith(".")]
        return sorted(n for n, folder in seen if folder), sorted(n for n, folder in seen if not folder)

    def below(self, name: str) -> Storage:
        """See Storage."""
        return LocalStorage(f"{self.title}/{name}", self._root / name, self.counter)

    def walk(self) -> list[Entry]:
        """See Storage."""
        if self._only is not None:
            return [self._entry("", self._only)]
        entries = []
        for folder, inside, names in os.walk(self._root, onerror=_unreadable, followlinks=True):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            entries += self._entries(folder, names)
        return sorted(entries, key=lambda entry: entry.order)

    def read(self, entry: Entry, start: int = 0, end: int | None = None) -> bytes:
        """See Storage."""
        with _reading(), open(self._root / entry.path, "rb", buffering=0) as file:
            if start:
                file.seek(start)
            content = file.readall() if end is None else _read_exactly(file, end - start)
        self.counter.add(len(content))
        if len(content) != (entry.size if end is None else end) - start:
            raise DataError(
                f"{self._root / entry.path} changed while it was copied (its listing says {entry.size:,} bytes); "
                "start again when nothing writes to the source any more"
            )
        return content

    def signature(self) -> list[str]:
        """What changes when files are added, removed or written: of every file up to SIGNED_FILES, else of folders.

        Reading the times of a million files on a network disk would take minutes at every start of a run.
        """
        if self._only is not None:
            return [str(self.walk())]
        files: list[str] = []
        folders: list[str] = []
        for folder, inside, names in os.walk(self._root, onerror=_unreadable, followlinks=True):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            folders.append(f"{Path(folder).relative_to(self._root)} {os.stat(folder).st_mtime_ns}")
            if len(files) <= SIGNED_FILES:
                files += [f"{e.path} {e.size} {e.tag}" for e in self._entries(folder, sorted(names))]
        return files if len(files) <= SIGNED_FILES else folders

    def _entries(self, folder: str, names: list[str]) -> list[Entry]:
        below = os.path.relpath(folder, self._root).replace(os.sep, "/")
        prefix = "" if below == "." else f"{below}/"
        return [self._entry(prefix, name) for name in names if not name.startswith(".")]

    def _entry(self, prefix: str, name: str) -> Entry:
        with _reading():
            stat = os.stat(f"{self._root}/{prefix}{name}")
        return Entry(prefix + name, stat.st_size, str(stat.st_mtime_ns))


@contextmanager
def _reading() -> Iterator[None]:
    """Turns an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); make it readable") from error


def _read_exactly(file: io.RawIOBase, size: int) -> bytes:
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
