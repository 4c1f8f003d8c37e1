"""How a source is laid out: told by data.format, or found by looking."""

from __future__ import annotations

from collections.abc import Callable

from lctrain.config.images import ImageFormat, ImagesConfig
from lctrain.data.images.folder import FolderSource
from lctrain.data.images.hub import SAVED, open_hub
from lctrain.data.images.idx import is_idx, open_idx
from lctrain.data.images.location import Location
from lctrain.data.images.sources import EXTENSIONS, ImageSource, split_folder
from lctrain.data.images.storage import Storage
from lctrain.data.images.tables import TABLES, open_tables
from lctrain.data.images.tar import TAR, open_tar
from lctrain.errors import DataError


def open_images_source(
    cfg: ImagesConfig, where: Location, *, known: Callable[[], list[str]] | None
) -> ImageSource | None:
    """The source of one split; None when `where` has no images to evaluate on.

    known: the training classes, for evaluation images.
    Raises DataError: nothing is there, or it is none of the layouts.
    """
    if where.path is None and not where.is_url:
        return open_hub(where)
    root = where.storage(cfg)
    storage = split_folder(root, where.split, own=where.own)
    layout = cfg.format
    if layout is ImageFormat.auto:
        # Without a validation part, the training part shows it.
        layout = detect(storage or split_folder(root, "train", own=False) or root)
    if layout is ImageFormat.hub:
        return open_hub(where)
    if layout is ImageFormat.folder:
        return None if storage is None else FolderSource(storage, known=None if known is None else known())
    # Their files may hold every split side by side.
    storage, own = (root, False) if storage is None else (storage, where.own or storage is not root)
    match layout:
        case ImageFormat.idx:
            return open_idx(storage, where.split, own=own, location=where.identity)
        case ImageFormat.tar:
            return open_tar(storage, where.split, own=own)
        case ImageFormat.parquet:
            return open_tables(storage, where.split, own=own)
    raise AssertionError(layout)


def detect(storage: Storage) -> ImageFormat:
    """The layout of what is in `storage`. Raises DataError saying what was looked for."""
    folders, files = storage.children()
    if any(is_idx(name) for name in files):
        return ImageFormat.idx
    if any(name in SAVED for name in files):
        return ImageFormat.hub
    for layout, endings in ((ImageFormat.tar, TAR), (ImageFormat.parquet, TABLES)):
        if any(name.lower().endswith(endings) for name in files):
            return layout
    for name in folders:
        _, inside = storage.below(name).children()
        if any(file.lower().endswith(EXTENSIONS) for file in inside):
            return ImageFormat.folder
        if any(file.lower().endswith(TABLES) for file in inside):
            return ImageFormat.parquet
    found = ", ".join([f"{name}/" for name in folders[:5]] + files[:5]) or "nothing"
    raise DataError(
        f"{storage.title} is no layout that data.format=auto knows: looked for idx files "
        f"(train-images-idx3-ubyte), {', '.join(TAR)} and {', '.join(TABLES)} files, a saved Hugging Face data set "
        f"({', '.join(SAVED)}) and class folders with images ({', '.join(EXTENSIONS)}); found {found}; give another "
        "folder, or say the layout with data.format"
    )
