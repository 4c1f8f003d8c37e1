"""Images in tar files: CLASS/NAME.jpg, or NAME.jpg beside NAME.cls as webdataset writes them."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from typing import IO, cast

from lctrain.data.images.sources import (
    EXTENSIONS,
    Cursor,
    FilesSource,
    Item,
    Split,
    read_class_names,
    split_files,
)
from lctrain.data.images.storage import Entry, Storage
from lctrain.errors import DataError

TAR = (".tar", ".tar.gz", ".tgz")
BLOCK = 8 << 20


class TarSource(FilesSource):
    """Archives in the order of their names, each read once from front to back; images keep the archive's order.

    A cursor is (number of the archive, byte of the next member's header in it, unpacked).
    """

    def __init__(self, storage: Storage, entries: list[Entry]) -> None:
        super().__init__(storage, entries)
        self.classes = read_class_names(storage)

    def read(self, start: Cursor) -> Iterator[Item]:
        """See ImageSource. Raises DataError for an archive that is damaged, or an image without a class."""
        for number in range(start[0], len(self.entries)):
            offset = start[1] if number == start[0] else 0
            try:
                yield from self._archive(number, offset)
            except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DataError(
                    f"{self.title}: {self.entries[number].path} is not a whole tar file ({error}); copy it again"
                ) from error

    def _archive(self, number: int, offset: int) -> Iterator[Item]:
        entry = self.entries[number]
        stream = cast(IO[bytes], self.storage.open(entry, block=BLOCK))
        if entry.path.endswith("gz"):
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=stream))
        stream.seek(offset)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            group: list[tuple[str, bytes, int]] = []
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of a million
                if not member.isfile():
                    continue
                if group and _key(group[0][0]) != _key(member.name):
                    yield from self._samples(number, group)
                    group = []
                content = archive.extractfile(member)
                assert content is not None
                wanted = member.name.lower().endswith((*EXTENSIONS, ".cls"))
                group.append((member.name, content.read() if wanted else b"", archive.offset))
            if group:
                yield from self._samples(number, group)
            # The reader takes a damaged header for the end.
            stream.seek(archive.offset)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {archive.offset:,}")

    def _samples(self, number: int, group: list[tuple[str, bytes, int]]) -> Iterator[Item]:
        """The images of members whose names differ only after the first dot."""
        images = [member for member in group if member[0].lower().endswith(EXTENSIONS)]
        given = next((content for name, content, _ in group if name.endswith(".cls")), None)
        end = group[-1][2]
        for name, content, after in images[:1] if given is not None else images:
            place = f"{self.entries[number].path}:{name}"
            label = _class_of(self.title, place, name) if given is None else _number(self.title, place, given)
            yield Item(place, label, partial(bytes, content), (number, after if given is None else end))


def open_tar(storage: Storage, split: Split, *, own: bool) -> TarSource | None:
    """The archives of a split; None when evaluation has none. Raises DataError when training has none."""
    entries = [entry for entry in storage.walk() if entry.path.lower().endswith(TAR)]
    if not entries:
        raise DataError(f"{storage.title} has no {', '.join(TAR)} files; give their folder, or another data.format")
    chosen = split_files(entries, split, own=own)
    return TarSource(storage, chosen) if chosen else None


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.split('.', 1)[0]}"


def _class_of(title: str, place: str, name: str) -> str:
    folders = name.split("/")[:-1]
    if not folders or folders[-1] in ("", "."):
        raise DataError(
            f"{title}: {place} has no class: neither a .cls file beside it nor a folder around it; pack "
            "CLASS/NAME.jpg, or NAME.jpg with NAME.cls"
        )
    return folders[-1]


def _number(title: str, place: str, content: bytes) -> int | str:
    text = content.decode("utf-8", "replace").strip()
    if not text:
        raise DataError(f"{title}: the .cls file of {place} is empty; write the class's number in it")
    return int(text) if text.lstrip("-").isdigit() else text
