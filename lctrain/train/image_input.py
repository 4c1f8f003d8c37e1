"""What an image job checks and prepares before its ranks meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from lctrain.config.image_checks import batch_notes
from lctrain.config.images import Decode, ImagesConfig
from lctrain.data.images.prepare import open_images, prepare_images
from lctrain.data.images.store import ImageStore
from lctrain.errors import ConfigError, ModelError
from lctrain.models.image_model import check_weights, image_signature
from lctrain.train.session import Session

SplitName = Literal["train", "eval"]


class ImageInput:
    """Images and classifier of a session."""

    samples = "images"
    # BatchNorm must not see the padding of a last step that images do not fill.
    keeps_last = False

    def __init__(self, session: Session) -> None:
        self._session, self._data = session, session.config.images

    def check(self) -> None:
        """A file of weights must be there before images are copied for hours; the rest needs the images."""
        path = self._session.config.image_model.path
        if path is not None and not Path(path).expanduser().is_file():
            raise ModelError(f"model.path={path} cannot be read (there is no such file); give a safetensors file")

    def prepare(self, split: str) -> ImageStore | None:
        """Copy the images here unless they are."""
        store = prepare_images(self._data, split=cast(SplitName, split), report=self._session.log)
        if store is not None:
            self._check_store(store)
            classes, channels = shape_of(self._session, store)
            model = self._session.config.image_model
            check_weights(model, classes=classes, channels=channels, image_size=self._data.image_size)
        elif split == "eval":
            self._check_no_evaluation()
        return store

    def open(self, key: str, split: str) -> ImageStore:
        """Map what the node's first rank copied."""
        return open_images(self._data, key=key, split=cast(SplitName, split))

    def signature(self, data: Any) -> dict[str, Any]:
        """The model and what the data make of it."""
        classes, channels = shape_of(self._session, data)
        model = self._session.config.image_model
        return image_signature(model, classes=classes, channels=channels, image_size=self._data.image_size)

    @property
    def size(self) -> str:
        """What a step consists of."""
        return f"images of {self._data.image_size} x {self._data.image_size}"

    @property
    def notes(self) -> list[str]:
        """Warnings that name their numbers."""
        resolved = self._session.resolved
        return batch_notes(self._session.config, resolved.accumulation, data_ranks=resolved.sizes.data)

    def _check_no_evaluation(self) -> None:
        config = self._session.config
        for field, value, off in (
            ("eval.every_steps", config.eval.every_steps, "0"),
            ("eval.every_epochs", config.eval.every_epochs, "0"),
            ("logging.mlperf", config.logging.mlperf, "false"),
        ):
            if value:
                raise ConfigError(
                    f"{field}={str(value).lower()} but data.source={self._data.source} holds no validation images "
                    f"(val/, validation/ or test/); give data.eval_source=PATH, or {field}={off}"
                )

    def _check_store(self, store: ImageStore) -> None:
        classes, channels = shape_of(self._session, store)
        if classes < len(store.manifest.classes):
            raise ConfigError(
                f"model.classes={classes} is less than the {len(store.manifest.classes)} classes of "
                f"{store.manifest.source}; leave it out, or give at least that many"
            )
        if channels != store.manifest.channels:
            raise ConfigError(
                f"model.channels={channels} but the images of {store.manifest.source} have {store.manifest.channels}; "
                "leave it out"
            )
        self._check_pixels(store)
        if len(self._data.mean) != channels:
            raise ConfigError(
                f"data.mean={self._data.mean} has {len(self._data.mean)} numbers but the images of "
                f"{store.manifest.source} have {channels} channels; give data.mean and data.std one for each"
            )

    def _check_pixels(self, store: ImageStore) -> None:
        """Raise ConfigError for what idx files, which hold pixels, make idle."""
        shape, size = store.manifest.raw_shape, self._data.image_size
        if shape is None:
            return
        of = f"the {shape[0]} x {shape[1]} pixels of {store.manifest.source}"
        if self._data.decode is Decode.fast:
            raise ConfigError(f"data.decode=fast has no effect on {of}, which need no decoding; leave it out")
        if shape[:2] == (size, size) and self._data.eval_crop != ImagesConfig().eval_crop:
            raise ConfigError(
                f"data.eval_crop={self._data.eval_crop} has no effect on {of}, which data.image_size={size} takes as "
                "they are; leave it out, or give another data.image_size"
            )


def shape_of(session: Session, store: ImageStore) -> tuple[int, int]:
    """(classes, channels) of the model: as configured, else the data's."""
    model = session.config.image_model
    return model.classes or len(store.manifest.classes), model.channels or store.manifest.channels
