"""Encoded images to pixels: simplejpeg, and Pillow for what it cannot read."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

_COLOURS = {1: "GRAY", 3: "RGB"}
_END = b"\xff\xd9"
_SEQUENTIAL, _TABLES = (0xC0, 0xC1), (0xC4, 0xC8, 0xCC)  # start of a frame; what else lies among their markers
_SPARE_ROWS = 8
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
    rows: int | None = None,
    scratch: Scratch | None = None,
) -> np.ndarray:
    """Pixels of an encoded image, [H, W, channels] uint8; gray images repeat their one channel.

    at_least: (height, width) that are enough. A JPEG is then decoded with the fast transform and upsampling, and at
    the smallest eighth of its size that has as much, if that is half of it or less (more costs as much as the whole).
    None decodes it whole, as Pillow would. rows: how many, from the top, are needed; a JPEG that is not made smaller
    may then end below them, H is less. scratch: where to put the pixels, if they are not kept.
    Raises ValueError with the reason where neither simplejpeg nor Pillow can read it.
    """
    import simplejpeg

    whole = size_of(data)
    if whole is not None:
        fast = at_least is not None
        height, width = at_least or whole
        if 2 * height > whole[0] or 2 * width > whole[1]:
            height, width = whole
        cut = cut_below(data, rows) if rows is not None and (height, width) == whole else None
        try:
            return simplejpeg.decode_jpeg(
                _unsigned(data) if cut is None else cut,
                _COLOURS[channels],
                fastdct=fast,
                fastupsample=fast,
                min_height=0 if cut else height,
                min_width=width,
                buffer=scratch.array(*whole, channels) if scratch else None,
                strict=cut is None,
            )
        except ValueError:
            pass  # it is strict: some files that every viewer shows have a flaw
    return _with_pillow(data, channels)


def cut_below(data: bytes | memoryview, rows: int) -> bytearray | None:
    """A JPEG whose header says that it ends a little below its first `rows` rows; None where that cannot be done.

    A decoder then stops there and leaves the rest of the data alone, which it can only skip with a warning. So the
    file must be one that was stored to its end, and have its one scan from top to bottom (SOF0 or SOF1).
    """
    view = _unsigned(data)
    if view[-2:] != _END:
        return None
    place = 2
    while place + 9 < len(view) and view[place] == 0xFF:
        marker = view[place + 1]
        if marker in _SEQUENTIAL:
            height = int.from_bytes(view[place + 5 : place + 7], "big")
            # Colours of a row may be made from those of the next one too.
            if rows + _SPARE_ROWS >= height:
                return None
            cut = bytearray(view)
            cut[place + 5 : place + 7] = (rows + _SPARE_ROWS).to_bytes(2, "big")
            return cut
        if 0xC0 <= marker <= 0xCF and marker not in _TABLES:
            return None
        place += 2 + int.from_bytes(view[place + 2 : place + 4], "big")
    return None


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
