"""The pixels of one batch: read, decoded, cropped and flipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lctrain.config.images import Crop, Decode, ImagesConfig
from lctrain.data.images.columns import RawPixels
from lctrain.data.images.decode import Scratch, decode, size_of
from lctrain.data.images.draws import uniforms
from lctrain.data.images.store import ImageStore
from lctrain.data.images.transform import DRAWS, Box, central, central_sizes, flips, random_box, resize, shift
from lctrain.data.order import EMPTY
from lctrain.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Work:
    """What one batch is made of.

    indices: [B] int64 samples, EMPTY where there is none. epochs: [B] int64, which pass each belongs to.
    augment: [B] bool, crop and flip at random. step: the step it is for, for people.
    """

    indices: np.ndarray
    epochs: np.ndarray
    augment: np.ndarray
    step: int


class BatchBuilder:
    """Makes batches of `store`. What a sample looks like depends on (seed, epoch, sample) and on `cfg` alone."""

    def __init__(self, store: ImageStore, *, cfg: ImagesConfig, seed: int) -> None:
        self._store, self._cfg, self._seed = store, cfg, seed
        self._channels = store.manifest.channels

    def shape(self, work: Work) -> tuple[int, ...]:
        """[B, S, S, C] of the pixels of `work`."""
        return len(work.indices), self._cfg.image_size, self._cfg.image_size, self._channels

    def images(self, work: Work, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pixels of `work`, [B, S, S, C] uint8; zeros where there is no sample. out: where to put them.

        Raises DataError naming an image that cannot be decoded.
        """
        import torch

        batch = torch.empty(self.shape(work), dtype=torch.uint8) if out is None else out
        live = work.indices != EMPTY
        batch.numpy()[~live] = 0
        draws = uniforms(self._seed, work.epochs, work.indices, DRAWS)
        fill = self._one_by_one if self._cfg.crop is Crop.random_resized else self._all_at_once
        with torch.inference_mode():  # no gradients, and calls cost less
            fill(batch, work, live, draws)
        return batch

    @cached_property
    def _raw(self) -> RawPixels | None:
        return RawPixels(self._store) if self._store.manifest.raw_shape else None

    @property
    def _fits(self) -> bool:
        size = self._cfg.image_size
        return self._raw is not None and self._raw.shape[:2] == (size, size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_raw"}  # a worker maps its own

    def _one_by_one(self, batch: torch.Tensor, work: Work, live: np.ndarray, draws: np.ndarray) -> None:
        """Fill the `live` places of `batch`, each with a random box of its image or with what evaluation sees."""
        import torch

        mirrored, scratch = self._mirrored(work, draws), Scratch()
        for place in np.flatnonzero(live).tolist():
            random = draws[place].tolist() if work.augment[place] else None
            image = torch.from_numpy(self._view(int(work.indices[place]), random, scratch))
            batch[place] = image.flip(1) if mirrored[place] else image

    def _all_at_once(self, batch: torch.Tensor, work: Work, live: np.ndarray, draws: np.ndarray) -> None:
        """Fill the `live` places of `batch` with what evaluation sees, moved at random."""
        out, scratch = batch.numpy(), Scratch()
        if self._raw is not None and self._fits:
            out[live] = self._raw.gather(work.indices[live])
        else:
            for place in np.flatnonzero(live).tolist():
                out[place] = self._view(int(work.indices[place]), None, scratch)
        if self._cfg.crop is Crop.padded and work.augment.any():
            out[...] = shift(out, draws=draws, padding=self._cfg.crop_padding, where=work.augment)
        mirrored = np.flatnonzero(self._mirrored(work, draws))
        batch[mirrored] = batch[mirrored].flip(2)

    def _mirrored(self, work: Work, draws: np.ndarray) -> np.ndarray:
        return flips(draws) & work.augment & self._cfg.flip

    def _view(self, index: int, draws: list[float] | None, scratch: Scratch) -> np.ndarray:
        """One image at S x S: a random box of it, or without draws what evaluation sees."""
        if self._raw is not None:
            pixels = self._raw.image(index)
            if draws is None and self._fits:
                return pixels.copy()
            return self._seen(pixels, None if draws is None else self._box(pixels.shape, draws))
        try:
            return self._decoded(self._store.image(index), draws, scratch)
        except ValueError as error:
            raise DataError(
                f"image {self._store.name(index)!r} of {self._store.folder} cannot be decoded ({error}); repair or "
                "remove it in the source and run python -m lctrain stage again"
            ) from error

    def _decoded(self, data: memoryview, draws: list[float] | None, scratch: Scratch) -> np.ndarray:
        size = size_of(data)
        if size is None:
            pixels = decode(data, channels=self._channels)
            return self._seen(pixels, None if draws is None else self._box(pixels.shape, draws))
        # A box belongs to the whole image, also where only a smaller one or its upper part is decoded.
        box = None if draws is None else self._box(size, draws)
        enough = self._enough(size, box) if self._cfg.decode is Decode.fast else None
        rows = None if box is None else box.top + box.height
        pixels = decode(data, channels=self._channels, at_least=enough, rows=rows, scratch=scratch)
        return self._seen(pixels, box if box is None else box.scaled(pixels.shape[1] / size[1], pixels.shape))

    def _seen(self, pixels: np.ndarray, box: Box | None) -> np.ndarray:
        size = self._cfg.image_size
        if box is None:
            return central(pixels, size=size, fraction=self._cfg.eval_crop)
        return resize(box.of(pixels), size, size)

    def _enough(self, whole: tuple[int, ...], box: Box | None) -> tuple[int, int]:
        """Height and width of an image in which what is seen has at least the S x S pixels it becomes."""
        height, width = whole
        size = self._cfg.image_size
        if box is None:
            return central_sizes(height, width, size=size, fraction=self._cfg.eval_crop)
        return math.ceil(height * size / box.height), math.ceil(width * size / box.width)

    def _box(self, whole: tuple[int, ...], draws: list[float]) -> Box:
        return random_box(whole[0], whole[1], draws=draws, area=self._cfg.crop_area)
