"""A Hugging Face data set of images by name, or one saved to a local folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lctrain.data.images.location import Location
from lctrain.data.images.sources import EVAL_NAMES, Cursor, ImageSource, Item
from lctrain.data.images.tables import IMAGE_COLUMNS, LABEL_COLUMNS, ROWS, given_label, image_bytes, pick
from lctrain.errors import DataError

SAVED = ("dataset_dict.json", "state.json")  # of save_to_disk


class HubSource(ImageSource):
    """The rows of one split, as files are kept in it. A cursor is (row, 0)."""

    def __init__(self, title: str, rows: Any) -> None:
        from datasets import ClassLabel, Image

        self.title, self.readers = title, min(os.cpu_count() or 1, 8)
        kinds = {name: type(feature) for name, feature in rows.features.items()}
        self._image = next((n for n, k in kinds.items() if k is Image), None) or pick(
            title, "an image", list(kinds), IMAGE_COLUMNS
        )
        self._label = next((n for n, k in kinds.items() if k is ClassLabel), None) or pick(
            title, "a label", list(kinds), LABEL_COLUMNS
        )
        if kinds[self._label] is ClassLabel:
            self.classes = list(rows.features[self._label].names)
        rows = rows.select_columns([self._image, self._label])
        self._rows = rows.cast_column(self._image, Image(decode=False)) if kinds[self._image] is Image else rows
        self.source_bytes, self._read = int(rows.data.nbytes), 0

    def read(self, start: Cursor) -> Iterator[Item]:
        """See ImageSource."""
        row = start[0]
        for batch in self._rows.select(range(row, len(self._rows))).iter(batch_size=ROWS):
            for value, given in zip(batch[self._image], batch[self._label], strict=True):
                place = f"row {row + 1}"
                data = self._bytes(place, value)
                label = given_label(self.title, place, given)
                self._read += len(data)
                row += 1
                yield Item(place, label, partial(bytes, data), (row, 0))

    def digest(self) -> str:
        """Hash of the columns' types, the number of rows and their size."""
        text = f"{self._rows.features} {len(self._rows)} {self.source_bytes}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def bytes_read(self) -> int:
        """See ImageSource."""
        return self._read

    def _bytes(self, place: str, value: Any) -> bytes:
        """A cell's image; a data set that was loaded from image files only names them."""
        if isinstance(value, dict) and value.get("bytes") is None and value.get("path"):
            try:
                return Path(value["path"]).read_bytes()
            except OSError as error:
                raise DataError(f"{self.title}: {place}: {error.filename} cannot be read ({error.strerror})") from error
        return image_bytes(self.title, place, value)


def open_hub(where: Location) -> HubSource | None:
    """The rows of a split; None when there are none to evaluate on. Raises DataError when it does not load."""
    import datasets

    try:
        if where.path is not None and _is_saved(where.path):
            loaded = datasets.load_from_disk(str(where.path))
        else:
            loaded = datasets.load_dataset(str(where.path or where.value))
    except Exception as error:  # the library, its hub client and the readers below it each raise their own
        raise DataError(
            f"{where.title} is no folder or file here and does not load as a Hugging Face data set "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); check the name; on a "
            "machine without network, load it once where there is one and bring the cache (HF_HOME)"
        ) from error
    rows = _split(where, loaded if isinstance(loaded, dict) else {"train": loaded})
    if rows is None:
        return None
    if not len(rows):
        raise DataError(f"{where.title} has no images in its {where.split} split; give a source with some")
    return HubSource(where.title, rows)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _split(where: Location, splits: dict[str, Any]) -> Any:
    held = next((splits[name] for name in EVAL_NAMES if name in splits), None)
    if where.split == "train":
        if "train" not in splits:
            raise DataError(f"{where.title} has no split `train` (it has {', '.join(splits)}); give another source")
        return splits["train"]
    if held is not None or not where.own:
        return held
    return next(iter(splits.values()))
