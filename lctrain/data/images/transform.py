"""Which part of an image is used, and its pixels at the size the model gets. S is that size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

ATTEMPTS = 10
DRAWS = 3 + 2 * ATTEMPTS  # of each sample: flip, top, left, and an area and a ratio an attempt
_FLIP, _TOP, _LEFT, _FIRST = 0, 1, 2, 3
_RATIOS = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Box:
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def scaled(self, scale: float, shape: tuple[int, ...]) -> Box:
        """The same part of the image at `scale` times its size, where it has `shape` [H, W, C]."""
        left, width = _moved(self.left, self.width, scale, shape[1])
        top, height = _moved(self.top, self.height, scale, shape[0])
        return Box(left, top, width, height)

    def of(self, pixels: np.ndarray) -> np.ndarray:
        """This part of `pixels` [H, W, C], in place."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


def _moved(start: int, length: int, scale: float, limit: int) -> tuple[int, int]:
    """Where an interval begins and how long it is in an image of `limit` pixels; at least one pixel of it."""
    first = min(round(start * scale), limit - 1)
    return first, max(round((start + length) * scale) - first, 1)


def random_box(height: int, width: int, *, draws: Sequence[float], area: Sequence[float]) -> Box:
    """A box of `area` (lowest, highest fraction of the image) and a ratio of 3/4 to 4/3 (Szegedy et al. 2014).

    draws: DRAWS numbers in [0, 1). The log of the ratio is uniform. After ATTEMPTS boxes that do not fit comes the
    largest central one whose ratio is allowed.
    """
    low, high = area
    first, last = (math.log(ratio) for ratio in _RATIOS)
    for place in range(_FIRST, DRAWS, 2):
        wanted = height * width * (low + (high - low) * draws[place])
        ratio = math.exp(first + (last - first) * draws[place + 1])
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(draws[_LEFT] * (width - w + 1)), int(draws[_TOP] * (height - h + 1)), w, h)
    w = min(width, max(1, round(height * _RATIOS[1])))
    h = min(height, max(1, round(width / _RATIOS[0])))
    return Box((width - w) // 2, (height - h) // 2, w, h)


def central_sizes(height: int, width: int, *, size: int, fraction: float) -> tuple[int, int]:
    """(height, width) when the short side becomes S / fraction."""
    short = round(size / fraction)
    if width <= height:
        return int(short * height / width), short
    return short, int(short * width / height)


def central(pixels: np.ndarray, *, size: int, fraction: float) -> np.ndarray:
    """What evaluation sees of `pixels` [H, W, C]: the short side at S / fraction, then the middle [S, S, C]."""
    height, width = central_sizes(*pixels.shape[:2], size=size, fraction=fraction)
    return Box(round((width - size) / 2), round((height - size) / 2), size, size).of(resize(pixels, height, width))


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """`pixels` [H, W, C] uint8 at [height, width, C], antialiased and bilinear.

    What Pillow's `resize` gives, to within rounding (one of 255): by torch where it has a kernel for this processor,
    which takes a sixth of the time, else by Pillow.
    """
    return (_torch_resize if _vectorised() else _pillow_resize)(pixels, height, width)


@cache
def _vectorised() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _torch_resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    import torch

    part = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
    # The stride `unsqueeze` gives a batch of one tells torch that channels lie last; it keeps them there.
    images = part.unsqueeze(0).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _pillow_resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    from PIL import Image

    channels = pixels.shape[2]
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).reshape(height, width, channels)


def flips(draws: np.ndarray) -> np.ndarray:
    """Which of the samples with `draws` [B, DRAWS] are seen in a mirror: [B] bool."""
    return draws[:, _FLIP] < 0.5


def shift(images: np.ndarray, *, draws: np.ndarray, padding: int, where: np.ndarray) -> np.ndarray:
    """Images [B, S, S, C] moved by up to `padding` pixels each way, zeros coming in (He et al. 2015, CIFAR).

    where: [B] bool, the images that move.
    """
    count, size, _, channels = images.shape
    top = np.where(where, (draws[:, _TOP] * (2 * padding + 1)).astype(np.int64), padding)
    left = np.where(where, (draws[:, _LEFT] * (2 * padding + 1)).astype(np.int64), padding)
    whole = f"V{channels}"  # pixels of C bytes, which NumPy moves as one
    padded = np.zeros((count, size + 2 * padding, size + 2 * padding), whole)
    padded[:, padding : padding + size, padding : padding + size] = images.view(whole)[..., 0]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    return windows[np.arange(count), top, left].view(np.uint8).reshape(images.shape)
