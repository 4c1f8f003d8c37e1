from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lctrain.data.images import transform
from lctrain.data.images.draws import stream, uniforms
from lctrain.data.images.transform import DRAWS, Box, central, flips, random_box, resize, shift

AREA = (0.08, 1.0)


def draws_of(samples: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return uniforms(seed, np.full(samples, epoch), np.arange(samples), DRAWS)


def test_stream_is_splitmix64() -> None:
    # The first outputs of the authors' C code, which xoshiro's page gives for these seeds.
    found = stream(np.array([1234567, 0], np.uint64), 3)
    assert found[0].tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert found[1].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    alone = uniforms(5, np.array([2]), np.array([7]), 4)
    among = uniforms(5, np.array([0, 2, 2]), np.array([7, 6, 7]), 4)
    assert np.array_equal(alone[0], among[2])
    several = np.concatenate([among, uniforms(6, np.array([2]), np.array([7]), 4)])
    assert len(np.unique(several)) == several.size
    # A resumed run must crop as it began to.
    assert uniforms(1, np.array([2]), np.array([3]), 2).tolist() == [[0.35539665882011373, 0.9287420769787708]]


def test_draws_are_uniform() -> None:
    values = draws_of(4000)
    assert 0 <= values.min() < values.max() < 1
    assert np.abs(values.mean(axis=0) - 0.5).max() < 0.02  # 4.4 standard errors
    assert np.abs(np.corrcoef(values.T) - np.eye(DRAWS)).max() < 0.08
    assert abs(flips(values).mean() - 0.5) < 0.03


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**32))
def test_random_box_lies_inside(height: int, width: int, seed: int) -> None:
    box = random_box(height, width, draws=draws_of(1, seed=seed)[0].tolist(), area=AREA)
    assert box.width >= 1
    assert box.height >= 1
    assert 0 <= box.left <= width - box.width
    assert 0 <= box.top <= height - box.height


def test_random_box_follows_its_distribution() -> None:
    boxes = [random_box(400, 500, draws=row, area=AREA) for row in draws_of(3000).tolist()]
    areas = np.array([box.width * box.height for box in boxes]) / (400 * 500)
    ratios = np.array([box.width / box.height for box in boxes])
    assert areas.min() >= 0.079
    # The same by rejection, another way round: what is left of many areas and ratios when those that do not fit go.
    random = np.random.default_rng(0)
    area, ratio = random.uniform(*AREA, 100_000), np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), 100_000))
    fits = (np.sqrt(area * 200_000 * ratio) <= 500) & (np.sqrt(area * 200_000 / ratio) <= 400)
    assert abs(areas.mean() - area[fits].mean()) < 0.015
    assert abs(ratios.mean() - ratio[fits].mean()) < 0.01
    assert 0.745 < ratios.min() < ratios.max() < 1.345
    spare = [(box.left / (500 - box.width), box.top / (400 - box.height)) for box in boxes if box.height < 300]
    assert np.abs(np.mean(spare, axis=0) - 0.5).max() < 0.02
    assert {box.left for box in boxes if box.width == 499} <= {0, 1}


def test_random_box_of_a_strip_is_its_middle() -> None:
    draws = draws_of(1)[0].tolist()
    assert random_box(10, 1000, draws=draws, area=(0.9, 1.0)) == Box(493, 0, 13, 10)
    assert random_box(1000, 9, draws=draws, area=(0.9, 1.0)) == Box(0, 494, 9, 12)
    assert random_box(1, 1, draws=draws, area=AREA) == Box(0, 0, 1, 1)


@pytest.fixture(params=["torch", "pillow"])
def resizer(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to resize; without its kernel torch's is slow, but as exact."""
    monkeypatch.setattr(transform, "_vectorised", lambda: request.param == "torch")
    return request.param


@pytest.mark.parametrize("size", [24, 96])
@pytest.mark.parametrize("shape", [(75, 100), (60, 60), (20, 33), (1, 3), (300, 7)])
def test_resize_is_pillows(resizer: str, shape: tuple[int, int], size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    for row in draws_of(8).tolist():
        box = random_box(*shape, draws=row, area=AREA)
        part = Image.fromarray(pixels).crop((box.left, box.top, box.left + box.width, box.top + box.height))
        wanted = np.asarray(part.resize((size + 5, size), Image.Resampling.BILINEAR))
        found = resize(box.of(pixels), size, size + 5)
        assert found.dtype == np.uint8
        assert np.abs(found.astype(int) - wanted).max() <= (1 if resizer == "torch" else 0)
        one = resize(box.of(pixels[..., :1]), size, size + 5)
        assert one.shape == (size, size + 5, 1)
        assert np.abs(one[..., 0].astype(int) - wanted[..., 0]).max() <= (1 if resizer == "torch" else 0)


def test_this_machine_has_one_way_to_resize() -> None:
    assert transform._vectorised() == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


@pytest.mark.parametrize("shape", [(75, 100), (100, 75), (32, 32), (20, 33), (333, 500), (1, 3)])
@pytest.mark.parametrize(("size", "fraction"), [(32, 0.875), (28, 1.0), (24, 0.5)])
def test_central_is_resizing_then_cropping(shape: tuple[int, int], size: int, fraction: float) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    short = round(size / fraction)
    height, width = (int(short * side / min(shape)) for side in shape)
    whole = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    wanted = np.asarray(whole.crop((left, top, left + size, top + size)))
    assert np.abs(central(pixels, size=size, fraction=fraction).astype(int) - wanted).max() <= 1


def test_scaled_box_keeps_its_part() -> None:
    box = Box(10, 20, 30, 40)
    assert box.scaled(0.25, (25, 25, 3)) == Box(2, 5, 8, 10)
    assert box.scaled(1.0, (60, 99, 3)) == box
    assert Box(99, 0, 1, 100).scaled(0.125, (13, 13, 3)) == Box(12, 0, 1, 12)


@pytest.mark.parametrize("channels", [1, 3])
def test_shift_moves_whole_images(channels: int) -> None:
    images = np.random.default_rng(2).integers(1, 256, (40, 6, 6, channels), dtype=np.uint8)
    draws = draws_of(40)
    where = np.arange(40) % 4 > 0
    moved = shift(images, draws=draws, padding=2, where=where)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    found = set()
    for before, after, moves in zip(padded, moved, where.tolist(), strict=True):
        matches = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.array_equal(before[top : top + 6, left : left + 6], after)
        ]
        assert len(matches) == 1
        assert moves or matches == [(2, 2)]
        found.update(matches)
    assert len(found) > 15
    assert {top for top, _ in found} == {left for _, left in found} == set(range(5))


def test_full_area_takes_the_whole_square() -> None:
    assert random_box(64, 64, draws=[0.5] * DRAWS, area=(1.0, 1.0)) == Box(0, 0, 64, 64)
