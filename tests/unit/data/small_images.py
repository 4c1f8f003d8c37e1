"""Small images, and small sources of every layout."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@lru_cache
def picture(seed: int, *, size: tuple[int, int] = (40, 32), kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """An encoded image of (width, height) `size`, different for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind)
    return out.getvalue()


def write_folder(root: Path, classes: dict[str, int], *, seed: int = 0) -> dict[str, bytes]:
    """So many images of each class below `root`; their bytes by name, in the order a source has them."""
    files = {}
    for name, count in sorted(classes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            files[f"{name}/{number:03d}.jpg"] = picture(seed := seed + 1)
    for path, content in files.items():
        (root / path).write_bytes(content)
    return files


def idx_bytes(numbers: np.ndarray) -> bytes:
    """An idx file of uint8 numbers."""
    return bytes((0, 0, 8, numbers.ndim)) + np.array(numbers.shape, ">u4").tobytes() + numbers.tobytes()


def write_idx(folder: Path, part: str, labels: Sequence[int], *, gz: bool = False) -> np.ndarray:
    """A pair of files with 5 x 4 images; their pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(labels)).integers(0, 255, (len(labels), 5, 4), dtype=np.uint8)
    for name, numbers in (("images-idx3", pixels), ("labels-idx1", np.array(labels, np.uint8))):
        content = idx_bytes(numbers)
        path = folder / f"{part}-{name}-ubyte{'.gz' if gz else ''}"
        path.write_bytes(gzip.compress(content) if gz else content)
    return pixels


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    """A tar file of these members in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_parquet(path: Path, images: Sequence[Any], labels: Sequence[Any], **options: Any) -> None:
    """A Parquet file with the columns image and label."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": list(images), "label": list(labels)}), path, **options)
