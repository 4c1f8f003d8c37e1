"""One split of a source, copied into a folder of shards: continued where it was interrupted, mended where damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from lctrain.data.images.classes import ClassNames
from lctrain.data.images.copying import Copier
from lctrain.data.images.progress import Progress, size_text
from lctrain.data.images.shards import PLACES_KEPT, Shard, is_whole, relabel, write_json
from lctrain.data.images.sources import START, ImageSource
from lctrain.data.images.store import MANIFEST, Manifest, parse_manifest
from lctrain.errors import DataError

PLAN = "plan.json"
Report = Callable[[str], None]


def stage(
    folder: Path, source: ImageSource, *, known: list[str] | None, resize_short: int | None, report: Report
) -> None:
    """Fill `folder` with the images of `source` and rename it from NAME.partial when all are there.

    Whole shards that an interrupted call left are kept when their checksums are right and the source's listing is
    what it was. known: the training classes, for evaluation images.
    Raises DataError: the source cannot be read, none of its images decodes, a label is outside the classes.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    kept, lost = _resume(partial, source, report)
    known = known or source.classes
    with Progress(source.title, total=source.source_bytes, begun=sum(s.read for s in kept), report=report) as progress:
        copier = Copier(source, partial, resize_short=resize_short, moved=progress.at, lost=lost)
        shards: list[Shard] = []

        def done(shard: Shard) -> None:
            shards.append(shard)
            write_json(partial / f"{shard.name}.json", asdict(shard))

        for shard in kept:
            if not is_whole(partial, shard, checksum=True):
                shard = _again(copier, shard, source, known, kept[-1].found)
                write_json(partial / f"{shard.name}.json", asdict(shard))
            shards.append(shard)
        last = kept[-1] if kept else Shard(name="")
        names = ClassNames(source.title, known=known, found=last.found)
        copier.rest(last.end if kept else START, names, number=len(kept), done=done)
    _finish(partial, source, shards, names)
    partial.rename(folder)
    # Only now: an end between these two lines must not look like a copy without a plan.
    for record in (folder / PLAN, *folder.glob("images-*.arrow.json")):
        record.unlink()


def _again(copier: Copier, shard: Shard, source: ImageSource, known: list[str] | None, found: list[str] | int) -> Shard:
    """A shard of an interrupted copy, with the labels it had."""
    if not shard.relabelled:
        return copier.again(shard, ClassNames(source.title, known=known, found=shard.found))
    assert isinstance(found, list), found
    again = copier.again(shard, ClassNames(source.title, known=sorted(found)))
    return replace(again, relabelled=True, found=shard.found)


def damaged(folder: Path, *, checksum: bool) -> list[Shard]:
    """The shards of a staged folder that are gone or not what was written. Raises DataError without a manifest."""
    shards = [Shard(**shard) for shard in parse_manifest(folder).shards]
    return [shard for shard in shards if not is_whole(folder, shard, checksum=checksum)]


def mend(folder: Path, source: ImageSource, broken: list[Shard], *, resize_short: int | None, report: Report) -> None:
    """Copy the `broken` shards of a staged folder again.

    Raises DataError when the source does not hold the same images any more.
    """
    manifest = parse_manifest(folder)
    shards = {shard["name"]: shard for shard in manifest.shards}
    size = sum(shard.read for shard in broken)
    with Progress(source.title, total=size, begun=0, report=report) as progress:
        copier = Copier(source, folder, resize_short=resize_short, moved=progress.at)
        for shard in broken:
            again = copier.again(shard, ClassNames(source.title, known=manifest.classes))
            shards[shard.name] = asdict(again) | {"relabelled": shard.relabelled, "found": shard.found}
    read = manifest.remote_bytes + source.bytes_read()
    fields = asdict(manifest) | {"shards": list(shards.values()), "remote_bytes": read}
    write_json(folder / MANIFEST, fields)


def _resume(partial: Path, source: ImageSource, report: Report) -> tuple[list[Shard], int]:
    """(shards an interrupted copy finished, bytes of the one it did not); makes the folder ready to write in."""
    listing = source.digest()
    plan = partial / PLAN
    if partial.is_dir() and (not plan.is_file() or json.loads(plan.read_text(encoding="utf-8")) != listing):
        report(f"stage: {source.title} is not what it was when {partial.name} was begun; starting from the beginning")
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    if not plan.is_file():
        write_json(plan, listing)
    lost = 0
    for leftover in partial.glob("*.partial"):
        lost += leftover.stat().st_size
        leftover.unlink()
    records = sorted(partial.glob("images-*.arrow.json"))
    shards = [Shard(**json.loads(path.read_text(encoding="utf-8"))) for path in records]
    if shards or lost:
        size = sum(shard.bytes for shard in shards)
        report(f"stage: {source.title}: going on; whole shards kept: {len(shards)} ({size_text(size)})")
    return shards, lost


def _finish(partial: Path, source: ImageSource, shards: list[Shard], names: ClassNames) -> None:
    """Labels in the order of the sorted names, then the manifest. Raises DataError when there is no image."""
    skipped = sum(shard.skipped for shard in shards)
    places = [place for shard in shards for place in shard.places][:PLACES_KEPT]
    if not sum(shard.rows for shard in shards):
        shutil.rmtree(partial)
        if skipped:
            raise DataError(
                f"{source.title}: none of its images decodes ({skipped:,}), the first {places[0]}; copy them again"
            )
        raise DataError(f"{source.title} has no images; give a source with some")
    classes, order = names.finish()
    if order is not None and order != sorted(order):
        for number, shard in enumerate(shards):
            if not shard.relabelled:
                shards[number] = relabel(partial, shard, order)
                write_json(partial / f"{shard.name}.json", asdict(shards[number]))
    manifest = Manifest(
        source=source.title,
        classes=classes,
        channels=source.raw_shape[2] if source.raw_shape else 3,
        raw_shape=source.raw_shape,
        shards=[asdict(shard) for shard in shards],
        skipped=skipped,
        skipped_places=places,
        remote_bytes=sum(shard.read for shard in shards),
        source_bytes=source.source_bytes,
        fingerprint=_fingerprint(classes, source.raw_shape, shards),
        listing=source.digest(),
    )
    write_json(partial / MANIFEST, asdict(manifest))


def _fingerprint(classes: list[str], raw_shape: tuple[int, int, int] | None, shards: list[Shard]) -> str:
    parts = [classes, raw_shape, [(shard.rows, shard.content) for shard in shards]]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
