"""Small pictures and staged stores of them."""

from __future__ import annotations

import io
import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
from PIL import Image

from lctrain.config.images import Crop, ImagesConfig
from lctrain.data.images.loader import ImageLoader
from lctrain.data.images.shards import Shard, ShardWriter, image_digest, shard_name
from lctrain.data.images.store import MANIFEST, ImageStore
from lctrain.data.order import SampleOrder

COUNT = 20
LABELS = [place % 5 for place in range(COUNT)]


def picture(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Smooth colours, [height, width, 3] uint8: what JPEG keeps well."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels: np.ndarray | Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """The bytes of a file of this kind."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write_store(
    folder: Path,
    images: Sequence[bytes],
    *,
    labels: Sequence[int],
    channels: int = 3,
    raw_shape: tuple[int, int, int] | None = None,
    shard_rows: int = 7,
) -> ImageStore:
    """A staged split with these images in this order, named image-0 and so on."""
    folder.mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, len(images), shard_rows)):
        writer = ShardWriter(folder, Shard(name=shard_name(number)))
        for place in range(first, min(first + shard_rows, len(images))):
            writer.add(images[place], labels[place], f"image-{place}", digest=image_digest(images[place]))
        shard = writer.finish()
        shards.append({"name": shard.name, "rows": shard.rows, "bytes": shard.bytes, "sha256": shard.sha256})
    fields = {
        "source": "test",
        "classes": [str(label) for label in range(max(labels) + 1)],
        "channels": channels,
        "raw_shape": raw_shape,
        "shards": shards,
        "skipped": 0,
        "skipped_places": [],
        "remote_bytes": 0,
        "source_bytes": sum(map(len, images)),
        "fingerprint": "test",
    }
    (folder / MANIFEST).write_text(json.dumps(fields), encoding="utf-8")
    return ImageStore(folder)


def jpeg_store(folder: Path) -> ImageStore:
    """COUNT JPEG files, no two of one size."""
    pictures = [picture(40 + place, 70 - place, seed=place) for place in range(COUNT)]
    return write_store(folder, [encoded(pixels, quality=90) for pixels in pictures], labels=LABELS)


def config(**settings: object) -> ImagesConfig:
    """Small images that are moved by up to two pixels."""
    return ImagesConfig(**{"image_size": 12, "crop": Crop.padded, "crop_padding": 2} | settings)


def loader_of(store: ImageStore, cfg: ImagesConfig, *, batch: int = 8, **settings) -> ImageLoader:
    """A loader of `batch` images a step."""
    order = SampleOrder(size=len(store), seed=7, global_batch_size=batch, limit=settings.pop("limit", None))
    return ImageLoader(store, cfg=cfg, order=order, **{"seed": 3} | settings)


def seen(loader: ImageLoader, first: int, end: int) -> list[tuple[int, bytes, list[int]]]:
    """Everything a loader gives, in a form that compares."""
    return [(s, b.images.numpy().tobytes(), b.labels.tolist()) for s, bs in loader.iterate(first, end) for b in bs]


def decoders() -> list[multiprocessing.Process]:
    """The decoding processes of this one; tests may have other children."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkServerProcess)]
