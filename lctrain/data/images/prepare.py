"""From a configuration to staged images: copied once a node, opened quickly ever after."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lctrain.config.images import ImagesConfig
from lctrain.data.cache import only_writer
from lctrain.data.images.check import require_decoders
from lctrain.data.images.layouts import open_images_source
from lctrain.data.images.location import Location, locate
from lctrain.data.images.progress import size_text
from lctrain.data.images.sources import Split
from lctrain.data.images.stage import damaged, mend, stage
from lctrain.data.images.store import MANIFEST, ImageStore, parse_manifest
from lctrain.errors import ConfigError, DataError

FORMAT_VERSION = 1
PLACES_SHOWN = 3
Report = Callable[[str], None]


def prepare_images(
    cfg: ImagesConfig, *, split: Split, report: Report = print, verify: bool = False
) -> ImageStore | None:
    """The images of one split, copied under data.cache unless they are there; None when there are none to evaluate on.

    One process at a time copies a split, the others wait. verify: read every staged shard and copy those again that
    are gone or damaged; without it only sizes are looked at, and damage is an error. What was staged from an object
    store is taken to be current and the store is not asked again.
    Raises DataError for what is missing, empty, malformed or damaged, and for a source that cannot be read.
    """
    begun = time.perf_counter()
    where = locate(cfg, split)
    if where.path is not None and _cache(cfg).resolve().is_relative_to(where.path.resolve()):
        raise ConfigError(f"data.cache={cfg.cache} lies inside {where.title}; give a folder outside the source")
    folder = _cache(cfg) / _key(cfg, where)
    staged = (folder / MANIFEST).is_file()
    if not staged and not verify and _nothing(folder).is_file():
        return None
    try:
        read: int | None = 0
        if verify or not staged:
            with only_writer(folder, report=report):
                read = _fill(cfg, where, folder, report, verify)
    except OSError as error:
        raise DataError(
            f"data.cache={cfg.cache} cannot be used ({error}); give a folder with room that you may write"
        ) from error
    if read is None:
        return None
    store = ImageStore(folder, remote_bytes=read)
    _tell(store, where, report, seconds=time.perf_counter() - begun)
    return store


def open_images(cfg: ImagesConfig, *, key: str, split: Split) -> ImageStore:
    """What `prepare_images` made, on another rank of the node: `key` is its ImageStore.key.

    Raises DataError when the folder is not there, or damaged.
    """
    folder = _cache(cfg) / key
    if not folder.is_dir():
        raise DataError(
            f"data.cache={cfg.cache} has no {key} with the {split} images, which this node's first rank has staged; "
            "give a data.cache that all ranks of a node see"
        )
    return ImageStore(folder)


def _cache(cfg: ImagesConfig) -> Path:
    return Path(cfg.cache).expanduser()


def _key(cfg: ImagesConfig, where: Location) -> str:
    """Names the images by where they come from and what is done to them; see Location.signature."""
    parts = [
        FORMAT_VERSION,
        where.split,
        cfg.format.name,
        cfg.resize_short,
        where.identity,
        cfg.endpoint_url,
        where.signature(),
    ]
    if where.split == "eval":
        parts.append(_key(cfg, locate(cfg, "train")))  # its labels follow the training classes
    digest = hashlib.blake2b(json.dumps(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', where.name).strip('-.') or 'images'}-{where.split}-{digest}"


def _fill(cfg: ImagesConfig, where: Location, folder: Path, report: Report, verify: bool) -> int | None:
    """Copy what is missing; bytes read from the source, None when it has no images of that split."""
    staged = (folder / MANIFEST).is_file()
    broken = damaged(folder, checksum=True) if staged and verify else []
    if staged and not broken:
        return 0
    require_decoders()
    known = partial(_training_classes, cfg, report) if where.split == "eval" else None
    source = open_images_source(cfg, where, known=known)
    if source is None:
        _nothing(folder).touch()
        return None
    _nothing(folder).unlink(missing_ok=True)
    if cfg.resize_short is not None and source.raw_shape is not None:
        raise DataError(
            f"data.resize_short={cfg.resize_short} does not apply to {source.title}, whose idx files hold pixels; "
            "leave data.resize_short out"
        )
    if broken:
        report(f"stage: {source.title}: damaged shards, copied again: {len(broken)}")
        mend(folder, source, broken, resize_short=cfg.resize_short, report=report)
    else:
        report(f"stage: copying {source.title} ({size_text(source.source_bytes)}) to {folder}")
        stage(folder, source, known=known() if known else None, resize_short=cfg.resize_short, report=report)
    return source.bytes_read()


def _nothing(folder: Path) -> Path:
    """Marks that the source has none of these images: spares asking an object store at every start."""
    return folder.with_name(f"{folder.name}.none")


def _training_classes(cfg: ImagesConfig, report: Report) -> list[str]:
    """What evaluation labels count by: of the staged training images, else of their source, read if it must be."""
    where = locate(cfg, "train")
    folder = _cache(cfg) / _key(cfg, where)
    if not (folder / MANIFEST).is_file():
        source = open_images_source(cfg, where, known=None)
        assert source is not None
        if source.classes is not None:
            return source.classes
        prepare_images(cfg, split="train", report=report)
    return parse_manifest(folder).classes


def _tell(store: ImageStore, where: Location, report: Report, *, seconds: float) -> None:
    manifest = store.manifest
    how = (
        f"staged, read amplification {manifest.read_amplification:.2f}"
        if store.remote_bytes
        else "already staged, 0 bytes read from the source"
    )
    report(f"data: {where.title} ({where.split}): {store.summary}; {how}; {seconds:.2f} s")
    if manifest.skipped:
        places = manifest.skipped_places
        more = "; ..." if manifest.skipped > PLACES_SHOWN else ""
        which = f"the first {len(places)} " if manifest.skipped > len(places) else ""
        report(
            f"data: images of {where.title} ({where.split}) left out, for they do not decode: {manifest.skipped:,} "
            f"({which}listed in {store.folder / MANIFEST}): {'; '.join(places[:PLACES_SHOWN])}{more}"
        )
