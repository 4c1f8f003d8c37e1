"""One folder a class, as torchvision's ImageFolder lays images out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lctrain.data.images.sources import EXTENSIONS, Cursor, FilesSource, Item
from lctrain.data.images.storage import Storage
from lctrain.errors import DataError


class FolderSource(FilesSource):
    """Images below class folders; labels follow the sorted folder names.

    known: the training classes, when these images are for evaluation.
    Raises DataError: no class folders, no images, an empty, missing or unknown class folder.
    """

    def __init__(self, storage: Storage, *, known: list[str] | None = None) -> None:
        folders, _ = storage.children()
        images = [e for e in storage.walk() if e.path.lower().endswith(EXTENSIONS) and "/" in e.path]
        if not images:
            raise DataError(
                f"{storage.title} has no images: looked for CLASS/NAME with {', '.join(EXTENSIONS)}; found folders "
                f"{', '.join(folders[:5]) or '(none)'}; give the folder that holds the class folders"
            )
        super().__init__(storage, images)
        self.classes = folders
        self._check_classes({e.order[0] for e in images}, known)

    def read(self, start: Cursor) -> Iterator[Item]:
        """A cursor is (number of the file, 0)."""
        for number, entry in enumerate(self.entries[start[0] :], start[0]):
            yield Item(entry.path, entry.order[0], partial(self.storage.read, entry), (number + 1, 0))

    def _check_classes(self, filled: set[str], known: list[str] | None) -> None:
        for name in known or []:
            if name not in filled:
                raise DataError(
                    f"{self.title} has no images of class {name}, which the training images have; add the folder "
                    f"{name}/ with its images, or remove the class from the training images"
                )
        for name in self.classes or []:
            if name not in filled:
                raise DataError(f"{self.title}/{name} has no images; fill the class folder or remove it")
            if known is not None and name not in known:
                raise DataError(
                    f"{self.title} has a class folder {name} that the training images do not have; remove it, or add "
                    "it there"
                )
