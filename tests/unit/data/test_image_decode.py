from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lctrain.data.images.decode import Scratch, cut_below, decode, size_of
from tests.support.staged_images import encoded, picture

PIXELS = picture(60, 90)


def with_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def test_jpeg_is_what_pillow_decodes() -> None:
    data = encoded(PIXELS, quality=90)
    assert np.array_equal(decode(data, channels=3), with_pillow(data))
    signed = memoryview(data).cast("b")  # as Arrow's buffers are
    assert np.array_equal(decode(signed, channels=3), with_pillow(data))
    assert size_of(signed) == (60, 90)
    assert size_of(data) == (60, 90)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_gray_repeats_its_channel_and_colours_become_gray(kind: str) -> None:
    gray = encoded(PIXELS[..., 0], kind)
    three = decode(gray, channels=3)
    assert three.shape == (60, 90, 3)
    for channel in range(3):
        assert np.array_equal(three[..., channel], with_pillow(gray, "L"))
    one = decode(encoded(PIXELS, kind, **({"quality": 95} if kind == "JPEG" else {})), channels=1)
    assert one.shape == (60, 90, 1)
    assert np.abs(one[..., 0].astype(int) - np.asarray(Image.fromarray(PIXELS).convert("L"))).mean() < 1


def test_pillow_reads_what_simplejpeg_does_not() -> None:
    cmyk = encoded(Image.fromarray(PIXELS).convert("CMYK"), quality=95)
    assert size_of(cmyk) is None
    assert np.array_equal(decode(cmyk, channels=3), with_pillow(cmyk))
    assert np.abs(decode(cmyk, channels=3).astype(int) - PIXELS).mean() < 4

    palette = encoded(Image.fromarray(PIXELS).convert("P"), "PNG")
    assert np.array_equal(decode(palette, channels=3), with_pillow(palette))
    assert size_of(palette) is None

    deep = (np.arange(60 * 90).reshape(60, 90) * 12).astype(np.uint16)
    assert np.array_equal(decode(encoded(Image.fromarray(deep), "PNG"), channels=1)[..., 0], deep >> 8)


def test_flaws_that_viewers_forgive_are_forgiven() -> None:
    data = encoded(PIXELS)
    scan = data.index(b"\xff\xda")
    flawed = data[:scan] + b"\x00\x00\x00" + data[scan:]  # extraneous bytes before a marker
    assert np.array_equal(decode(flawed, channels=3), with_pillow(data))


@pytest.mark.parametrize("part", [0, 10, 400])
def test_what_cannot_be_read_says_why(part: int) -> None:
    assert len(encoded(PIXELS)) > 800
    with pytest.raises(ValueError, match=r"Error: \w+"):
        decode(encoded(PIXELS)[:part], channels=3)


@pytest.mark.parametrize(
    ("least", "eighths"),
    [((64, 96), 8), ((33, 1), 8), ((32, 48), 4), ((1, 49), 8), ((8, 12), 1), ((17, 1), 3), ((200, 200), 8)],
)
def test_enough_is_the_smallest_eighth_or_the_whole(least: tuple[int, int], eighths: int) -> None:
    pixels = picture(64, 96)
    found = decode(encoded(pixels, quality=95), channels=3, at_least=least)
    assert found.shape == (8 * eighths, 12 * eighths, 3)
    small = np.asarray(Image.fromarray(pixels).resize(found.shape[1::-1], Image.Resampling.BOX))
    assert np.abs(found.astype(int) - small).mean() < 5


@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"restart_marker_rows": 1}]
)
def test_rows_below_need_not_be_decoded(options: dict[str, int]) -> None:
    pixels = picture(93, 70, seed=1)
    for colours, channels in ((pixels, 3), (pixels[..., 0], 1)):
        data = encoded(colours, quality=90, **options)
        whole = decode(data, channels=channels)
        for rows in range(1, 94):
            part = decode(data, channels=channels, rows=rows, scratch=Scratch())
            assert rows <= len(part) <= max(rows + 8, 93)
            assert np.array_equal(part[:rows], whole[:rows])
        assert len(decode(data, channels=channels, rows=10)) == 18
        assert np.array_equal(decode(data, channels=channels, rows=93), whole)


def test_files_that_must_be_decoded_whole_are() -> None:
    plain = encoded(PIXELS)
    assert cut_below(plain, 20) is not None
    assert cut_below(encoded(PIXELS, progressive=True), 20) is None
    assert cut_below(plain + b"more", 20) is None
    assert cut_below(plain[:-2], 20) is None
    assert cut_below(plain[:30] + b"\xff\xd9", 20) is None
    assert cut_below(b"", 20) is None
    progressive = encoded(PIXELS, progressive=True)
    assert np.array_equal(decode(progressive, channels=3, rows=20), with_pillow(progressive))
    with pytest.raises(ValueError, match="truncated"):
        decode(plain[:-300], channels=3, rows=20)
    png = encoded(PIXELS, "PNG")
    assert np.array_equal(decode(png, channels=3, rows=20), PIXELS)


def test_scratch_is_used_again() -> None:
    scratch, data = Scratch(), encoded(PIXELS)
    first = decode(data, channels=3, scratch=scratch)
    assert np.array_equal(first, decode(data, channels=3))
    small = decode(encoded(PIXELS[:16, :24]), channels=3, scratch=scratch)
    assert np.array_equal(small, decode(encoded(PIXELS[:16, :24]), channels=3))
    assert np.shares_memory(first, small)
    half = decode(data, channels=3, at_least=(30, 45), scratch=scratch)
    assert np.array_equal(half, decode(data, channels=3, at_least=(30, 45)))
    assert half.shape == (30, 45, 3)
