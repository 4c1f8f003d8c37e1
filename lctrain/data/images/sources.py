"""What every source of labelled images offers, and which of a source's parts is which split."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lctrain.data.images.storage import Entry, Storage
from lctrain.errors import DataError

Split = Literal["train", "eval"]
Cursor = tuple[int, int]  # where a source is read on from: its own numbers
START: Cursor = (0, 0)

EVAL_NAMES = ("val", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True, slots=True)
class Item:
    """One image. name: where it is in the source. label: of the class, or its name. load: its bytes.

    after: where to read on when this one is done.
    """

    name: str
    label: int | str
    load: Callable[[], bytes]
    after: Cursor


class ImageSource(ABC):
    """Labelled images in a fixed order.

    title: how messages name it. classes: names by label, None when they are known only after reading. raw_shape:
    (H, W, C) of uint8 pixels, None for encoded files. source_bytes: of the files it reads. readers: threads that
    keep it busy.
    """

    title: str
    classes: list[str] | None = None
    raw_shape: tuple[int, int, int] | None = None
    source_bytes: int
    readers: int

    @abstractmethod
    def read(self, start: Cursor) -> Iterator[Item]:
        """The images from `start` on. Raises DataError for what cannot be read."""

    @abstractmethod
    def digest(self) -> str:
        """Changes when the listing of the source does."""

    @abstractmethod
    def bytes_read(self) -> int:
        """From the source, so far, repeated reads included."""


class FilesSource(ImageSource):
    """A source made of files of a storage."""

    def __init__(self, storage: Storage, entries: list[Entry]) -> None:
        self.storage, self.entries = storage, entries
        self.title, self.readers = storage.title, storage.readers
        self.source_bytes = sum(entry.size for entry in entries)

    def digest(self) -> str:
        """Hash of the names, sizes and tags of the files."""
        whole = hashlib.blake2b(digest_size=16)
        for entry in self.entries:
            whole.update(f"{entry.path}\0{entry.size}\0{entry.tag}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def bytes_read(self) -> int:
        """See ImageSource."""
        return self.storage.counter.total


def split_folder(root: Storage, split: Split, *, own: bool) -> Storage | None:
    """The folder of a split: train/ or val/, validation/, test/ where the source has them, else the source itself.

    own: the source was given for evaluation only, so what has no val/ is all of it. None: no validation part.
    """
    folders, _ = root.children()
    held = next((name for name in EVAL_NAMES if name in folders), None)
    # A data set may have a class that is called train: then there are other classes and no val/.
    divided = "train" in folders and (held is not None or folders == ["train"])
    if split == "train":
        return root.below("train") if divided else root
    if divided and held is not None:
        return root.below(held)
    return root if own and not divided else None


def split_files(entries: list[Entry], split: Split, *, own: bool) -> list[Entry]:
    """The files of a split by their names (train-00.tar, validation-00.tar); none for a split that is not there.

    Files whose names say nothing are all of the training split, or of a source given for evaluation only.
    """
    named = {name: [e for e in entries if _says(e, name)] for name in ("train", *EVAL_NAMES)}
    held = next((named[name] for name in EVAL_NAMES if named[name]), [])
    if split == "train":
        return named["train"] or [e for e in entries if e not in held]
    if held or not own:
        return held
    return [e for e in entries if e not in named["train"]]


def _says(entry: Entry, name: str) -> bool:
    return re.search(rf"(^|[-_./]){name}([-_.]|$)", entry.path) is not None


def read_class_names(storage: Storage) -> list[str] | None:
    """The names in classes.txt, one a line; None without that file. Raises DataError when it is not UTF-8 or empty."""
    if "classes.txt" not in storage.children()[1]:
        return None
    entry = next(e for e in storage.walk() if e.path == "classes.txt")
    try:
        names = [line.strip() for line in storage.read(entry).decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{storage.title}/classes.txt is not UTF-8; save it as UTF-8, one class name a line") from error
    if not names or len(set(names)) < len(names):
        raise DataError(f"{storage.title}/classes.txt is empty or names a class twice; one class name a line, by label")
    return names
