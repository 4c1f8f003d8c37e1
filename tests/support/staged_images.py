"""Small pictures and staged stores of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lctrain.data.images.shards import Shard, ShardWriter, image_digest, shard_name
from lctrain.data.images.store import MANIFEST, ImageStore


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
