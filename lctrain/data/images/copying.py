"""From a source to shards: reading ahead, checking, and writing in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lctrain.data.images.check import BadImage, checked
from lctrain.data.images.classes import ClassNames
from lctrain.data.images.shards import SHARD_BYTES, Shard, ShardWriter, image_digest, shard_name
from lctrain.data.images.sources import Cursor, ImageSource, Item
from lctrain.errors import DataError

AHEAD = 4  # images on their way for each thread


@dataclass(frozen=True)
class _Made:
    data: bytes
    digest: bytes


class Copier:
    """Copies parts of a source into shards of `folder`.

    resize_short: see ImagesConfig. moved: called with the bytes read from the source so far, after each image.
    lost: bytes that an interrupted copy read in vain; they count as read for the first shard.
    """

    def __init__(
        self,
        source: ImageSource,
        folder: Path,
        *,
        resize_short: int | None,
        moved: Callable[[int], None],
        lost: int = 0,
    ) -> None:
        self._source, self._folder, self._resize, self._moved = source, folder, resize_short, moved
        self._counted = -lost

    def rest(self, start: Cursor, names: ClassNames, *, number: int, done: Callable[[Shard], None]) -> None:
        """Shards `number`, ... of all images from `start` on; `done` is told each as it gets its name."""
        writer = self._writer(shard_name(number), start)
        try:
            for item, made in self._images(start, None):
                self._add(writer, item, made, names)
                if writer.image_bytes >= SHARD_BYTES:
                    done(self._finish(writer, names))
                    number += 1
                    writer = self._writer(shard_name(number), item.after)
            # What is left out at the very end belongs to a shard too, if one without rows.
            if writer.shard.rows or writer.shard.skipped:
                done(self._finish(writer, names))
            else:
                writer.remove()
        finally:
            writer.abandon()

    def again(self, shard: Shard, names: ClassNames) -> Shard:
        """The images of a shard that was made before.

        Raises DataError, with no file of its name written, when the source holds other ones now.
        """
        writer = self._writer(shard.name, shard.begin)
        try:
            for item, made in self._images(shard.begin, shard.end):
                self._add(writer, item, made, names)
            if writer.content != shard.content:
                raise DataError(
                    f"{self._source.title} does not hold the images of {self._folder / shard.name} any more; remove "
                    f"{self._folder} and stage the source as it is now"
                )
            return self._finish(writer, names)
        finally:
            writer.abandon()

    def _writer(self, name: str, begin: Cursor) -> ShardWriter:
        return ShardWriter(self._folder, Shard(name=name, begin=begin, end=begin))

    def _add(self, writer: ShardWriter, item: Item, made: _Made | BadImage, names: ClassNames) -> None:
        name = item.name.encode("utf-8", "replace").decode()  # file names may be bytes of any kind
        if isinstance(made, BadImage):
            writer.shard.skip(f"{name}: {made}")
        else:
            writer.add(made.data, names.label(item.label, name), name, digest=made.digest)
        writer.shard.end = item.after
        self._moved(self._source.bytes_read())

    def _finish(self, writer: ShardWriter, names: ClassNames) -> Shard:
        read = self._source.bytes_read()
        writer.shard.found = names.found
        writer.shard.read, self._counted = read - self._counted, read
        return writer.finish()

    def _images(self, start: Cursor, end: Cursor | None) -> Iterator[tuple[Item, _Made | BadImage]]:
        """Images in the source's order, read and checked by several threads ahead of the writer."""
        if self._source.raw_shape is not None:  # in memory, with nothing to check
            yield from self._in_memory(start, end)
            return
        threads = max(self._source.readers, min(os.cpu_count() or 1, 8))
        pending: deque[tuple[Item, Future[_Made | BadImage]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="stage")
        try:
            for item in self._source.read(start):
                pending.append((item, pool.submit(self._make, item)))
                if len(pending) > AHEAD * threads:
                    first, made = pending.popleft()
                    yield first, made.result()
                if item.after == end:
                    break
            while pending:
                first, made = pending.popleft()
                yield first, made.result()
        finally:
            # All are done, or none is wanted: what is still being read or tried again must not hold up the end.
            pool.shutdown(wait=False, cancel_futures=True)

    def _in_memory(self, start: Cursor, end: Cursor | None) -> Iterator[tuple[Item, _Made | BadImage]]:
        for item in self._source.read(start):
            yield item, self._make(item)
            if item.after == end:
                break

    def _make(self, item: Item) -> _Made | BadImage:
        data = item.load()
        if self._source.raw_shape is None:
            try:
                data = checked(data, resize_short=self._resize)
            except BadImage as bad:
                return bad
        return _Made(data, image_digest(data))
