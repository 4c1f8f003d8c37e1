"""Images in idx files, as MNIST and Fashion-MNIST come: http://yann.lecun.com/exdb/mnist (the format's description)."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from lctrain.data.images.sources import Cursor, FilesSource, Item, Split, read_class_names
from lctrain.data.images.storage import Entry, Storage
from lctrain.errors import DataError

# Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747, table 1.
FASHION_MNIST = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip

_NAME = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")


def is_idx(name: str) -> bool:
    """Whether a file's name is one of the four (train|t10k)-(images|labels)-idx?-ubyte, plain or .gz."""
    return _NAME.fullmatch(name) is not None


class IdxSource(FilesSource):
    """One split's pair of files, held in memory as it is read; stored as uint8 pixels [H, W, 1]."""

    def __init__(self, storage: Storage, pair: tuple[Entry, Entry], *, location: str) -> None:
        super().__init__(storage, list(pair))
        self.classes = read_class_names(storage)
        if self.classes is None and re.search(r"fashion[-_ ]?mnist", location.lower()):
            self.classes = FASHION_MNIST
        self._images, self._labels = (self._numbers(entry, dims) for entry, dims in zip(pair, (3, 1), strict=True))
        if len(self._images) != len(self._labels):
            raise DataError(
                f"{storage.title}: {pair[0].path} has {len(self._images):,} images but {pair[1].path} has "
                f"{len(self._labels):,} labels; take both files from the same place"
            )
        height, width = self._images.shape[1:]
        self.raw_shape = (int(height), int(width), 1)

    def read(self, start: Cursor) -> Iterator[Item]:
        """A cursor is (index, 0)."""
        name = self.entries[0].path
        for index in range(start[0], len(self._images)):
            load = partial(self._images[index].tobytes)
            yield Item(f"{name}:{index}", int(self._labels[index]), load, (index + 1, 0))

    def _numbers(self, entry: Entry, dims: int) -> np.ndarray:
        content = self.storage.read(entry)
        where = f"{self.storage.title}: {entry.path}"
        if entry.path.endswith(".gz"):
            try:
                content = gzip.decompress(content)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{where} is not a whole gzip file ({error}); copy it again") from error
        header = 4 + 4 * dims
        if content[:4] != bytes((0, 0, 8, dims)) or len(content) < header:
            raise DataError(f"{where} is not an idx file of bytes in {dims} dimensions; copy it again")
        shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dims, offset=4))
        size = int(np.prod(shape, dtype=np.int64))
        if len(content) - header != size:
            said = " x ".join(map(str, shape))
            raise DataError(
                f"{where} has {len(content) - header:,} bytes of numbers, but its header says {said} = {size:,}; "
                "copy it again"
            )
        return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def open_idx(storage: Storage, split: Split, *, own: bool, location: str) -> IdxSource | None:
    """The train-* files, or t10k-* for evaluation; None when evaluation has none.

    own: given for evaluation only: then train-* files will do. location: path or URL of the source.
    """
    found = {name: entry for entry in storage.walk() if is_idx(name := entry.path)}
    for part in ("train",) if split == "train" else ("t10k", "train") if own else ("t10k",):
        pair = [_choose(found, f"{part}-{what}") for what in ("images", "labels")]
        if pair[0] is not None and pair[1] is not None:
            return IdxSource(storage, (pair[0], pair[1]), location=location)
        if pair != [None, None]:
            missing = f"{part}-labels-idx1-ubyte" if pair[1] is None else f"{part}-images-idx3-ubyte"
            raise DataError(f"{storage.title} has no {missing} (or .gz) beside its partner; copy it there")
    if split == "eval" and not own:
        return None
    raise DataError(
        f"{storage.title} has no train-images-idx3-ubyte and train-labels-idx1-ubyte (or .gz); give the folder that "
        "holds them, or another data.format"
    )


def _choose(found: dict[str, Entry], start: str) -> Entry | None:
    """The file that starts so; the plain one before the .gz."""
    names = sorted((name for name in found if name.startswith(start)), key=lambda name: name.endswith(".gz"))
    return found[names[0]] if names else None
