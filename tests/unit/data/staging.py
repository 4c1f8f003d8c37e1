"""Staging small sources, and stopping on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from lctrain.config.images import ImagesConfig
from lctrain.data.images import copying
from lctrain.data.images.prepare import prepare_images
from lctrain.data.images.storage import Entry, LocalStorage
from lctrain.data.images.store import ImageStore
from tests.unit.data.small_images import picture


def config(tmp_path: Path, **fields: object) -> ImagesConfig:
    given = {"source": str(tmp_path / "source"), "cache": str(tmp_path / "cache"), "image_size": 16} | fields
    return ImagesConfig(**given)  # type: ignore[arg-type]


def staged(cfg: ImagesConfig, split: str = "train", **options: object) -> ImageStore:
    found = prepare_images(cfg, split=split, **({"report": lambda _: None} | options))  # type: ignore[arg-type]
    assert found is not None
    return found


def content(store: ImageStore) -> list[tuple[str, int, bytes]]:
    return [(store.name(i), store.label(i), bytes(store.image(i))) for i in range(len(store))]


def fill_shards_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the small images fill a shard."""
    monkeypatch.setattr(copying, "SHARD_BYTES", 2 * len(picture(0)) + 1000)


class Stopped(Exception):
    """The copy ends here."""


def stop_after(monkeypatch: pytest.MonkeyPatch, images: int) -> list[str]:
    """Let so many files be read, then raise Stopped; the names that were read."""
    read, plain = [], LocalStorage.read

    def counted(self: LocalStorage, entry: Entry, start: int = 0, end: int | None = None) -> bytes:
        if len(read) == images:
            raise Stopped
        read.append(entry.path)
        return plain(self, entry, start, end)

    monkeypatch.setattr(LocalStorage, "read", counted)
    monkeypatch.setattr(copying, "AHEAD", 0)
    return read
