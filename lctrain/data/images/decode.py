"""Encoded images to pixels: simplejpeg, and Pillow for what it cannot read."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

_COLOURS = {1: "GRAY", 3: "RGB"}
_SUBTRACTIVE = ("CMYK", "YCCK")  # Pillow knows which of these files are inverted


def size_of(data: bytes | memoryview) -> tuple[int, int] | None:
    """(height, width) a JPEG says it has; None where simplejpeg cannot read it."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(_unsigned(data))
    except ValueError:
        return None
    return None if colours in _SUBTRACTIVE else (height, width)


class Scratch:
    """Memory that is used again: asking for new pages takes a sixth of the time of decoding into them."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def array(self, *shape: int) -> np.ndarray:
        """`shape` of uint8 with any content, until the next call."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].reshape(shape)


def decode(
    data: bytes | memoryview,
    *,
    channels: int,
    at_least: tuple[int, int] | None = None,
    scratch: Scratch | None = None,
) -> np.ndarray:
    """Pixels of an encoded image, [H, W, channels] uint8; gray images repeat their one channel.

    at_least: (height, width) that are enough. A JPEG is then decoded with the fast transform and upsampling, and at
    the smallest eighth of its size that has as much, if that is half of it or less (more costs as much as the whole).
    None decodes it whole, as Pillow would. scratch: where to put the pixels, if they are not kept.
    Raises ValueError with the reason where neither simplejpeg nor Pillow can read it.
    """
    import simplejpeg

    whole = size_of(data)
    if whole is not None:
        fast = at_least is not None
        height, width = at_least or whole
        if 2 * height > whole[0] or 2 * width > whole[1]:
            height, width = whole
        try:
            return simplejpeg.decode_jpeg(
                _unsigned(data),
                _COLOURS[channels],
                fastdct=fast,
                fastupsample=fast,
                min_height=height,
                min_width=width,
                buffer=scratch.array(*whole, channels) if scratch else None,
            )
        except ValueError:
            pass  # it is strict: some files that every viewer shows have a flaw
    return _with_pillow(data, channels)


def _unsigned(data: bytes | memoryview) -> memoryview:
    return memoryview(data).cast("B")  # simplejpeg takes no other type; Arrow's buffers say they are signed


def _with_pillow(data: bytes | memoryview, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(_eight_bits(image).convert("L" if channels == 1 else "RGB"))
    # A damaged file makes its plugin raise whatever the bytes lead it to, struct.error and SyntaxError among them.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image itself, or one of 16 bits a pixel (a gray PNG) scaled down: `convert` would clip it."""
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
