"""Sources as a configuration opens them, and what they give."""

from __future__ import annotations

from pathlib import Path

from lctrain.config.images import ImagesConfig
from lctrain.data.images.layouts import open_images_source
from lctrain.data.images.location import locate
from lctrain.data.images.sources import START, ImageSource


def source(path: Path, split: str = "train", *, known: list[str] | None = None, **fields: object) -> ImageSource | None:
    cfg = ImagesConfig(source=str(path), **fields)  # type: ignore[arg-type]
    return open_images_source(cfg, locate(cfg, split), known=None if known is None else lambda: known)  # type: ignore[arg-type]


def train(path: Path, **fields: object) -> ImageSource:
    found = source(path, **fields)
    assert found is not None
    return found


def rows(found: ImageSource | None) -> list[tuple[int | str, bytes]]:
    assert found is not None
    return [(item.label, item.load()) for item in found.read(START)]
