"""Where images come from, where they are kept, and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lctrain.config.checks import require
from lctrain.config.data import DataConfig


class ImageFormat(Enum):
    """How a source is laid out; `auto` looks at it."""

    auto = "auto"
    folder = "folder"
    tar = "tar"
    parquet = "parquet"
    hub = "hub"
    idx = "idx"


class Crop(Enum):
    """The random part of a training image that is used.

    random_resized: an area of crop_area and an aspect ratio of 3/4 to 4/3, resized (Szegedy et al. 2014);
    padded: a shift of up to crop_padding pixels (He et al. 2015, CIFAR); none: as for evaluation.
    """

    random_resized = "random_resized"
    padded = "padded"
    none = "none"


class Decode(Enum):
    """exact: every JPEG is decoded whole; fast: at the smallest eighth that still covers the wanted size."""

    exact = "exact"
    fast = "fast"


@dataclass(kw_only=True)
class ImagesConfig(DataConfig):
    """Images with one label each, copied once per node into Arrow shards under data.cache.

    source: a folder (one folder a class, under train/ and val/ where it has both), tar or Parquet files, a Hugging
    Face data set name, a folder of idx files, or a URL of an object store (s3://bucket/prefix).
    eval_source: validation images, when the source does not hold them.
    cache: where the shards of every source are kept. resize_short: resize the short side to so many pixels when
    copying; null keeps the files' own bytes.
    endpoint_url: address of an S3-compatible store other than Amazon's (OBS, MinIO). retries, timeout_s: attempts
    and seconds for each remote read.
    image_size: side of the square the model gets. eval_crop: image_size / short side in evaluation.
    mean, std: of each channel in [0, 1], for normalising on the device.
    augment_epochs: crop and flip at random up to this epoch only; null is always.
    workers: decoding processes of each rank; null takes the cores a rank has, at most 8; 0 decodes in the rank.
    """

    kind: str = "images"
    source: str | None = None
    eval_source: str | None = None
    format: ImageFormat = ImageFormat.auto
    cache: str = "~/.cache/lctrain/images"
    resize_short: int | None = None
    endpoint_url: str | None = None
    retries: int = 5
    timeout_s: float = 60.0
    image_size: int = 224
    eval_crop: float = 0.875
    crop: Crop = Crop.random_resized
    crop_area: list[float] = field(default_factory=lambda: [0.08, 1.0])
    crop_padding: int = 4
    flip: bool = True
    augment_epochs: float | None = None
    decode: Decode = Decode.exact
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    workers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "retries", "timeout_s"):
            value = getattr(self, name)
            require(value > 0, f"data.{name}", value, "must be positive", "leave it out for the default")
        require(
            self.resize_short is None or self.resize_short >= self.image_size,
            "data.resize_short",
            self.resize_short,
            f"is smaller than data.image_size={self.image_size}",
            "give at least the size the model sees, e.g. 256 for 224, or null to keep files as they are",
        )
        require(0 < self.eval_crop <= 1, "data.eval_crop", self.eval_crop, "must be in (0, 1]", "0.875 is usual")
        low, high = self.crop_area if len(self.crop_area) == 2 else (0.0, 0.0)
        require(
            0 < low <= high <= 1,
            "data.crop_area",
            self.crop_area,
            "must be two fractions of the image's area, the smaller first",
            "e.g. [0.08,1.0]",
        )
        require(self.crop_padding >= 0, "data.crop_padding", self.crop_padding, "must not be negative", "e.g. 4")
        require(
            self.augment_epochs is None or self.augment_epochs >= 0,
            "data.augment_epochs",
            self.augment_epochs,
            "must not be negative",
            "or null to augment always",
        )
        require(
            self.workers is None or self.workers >= 0,
            "data.workers",
            self.workers,
            "must not be negative",
            "0 decodes in the training process, null chooses",
        )
        require(
            len(self.mean) == len(self.std) and all(s > 0 for s in self.std),
            "data.std",
            self.std,
            f"must be positive and as many as data.mean={self.mean}",
            "give one mean and one std a channel, in [0, 1]",
        )
