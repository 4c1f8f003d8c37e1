from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lctrain.config.images import Crop, Decode, ImagesConfig
from lctrain.data.images import batch as batch_module
from lctrain.data.images.batch import BatchBuilder, Work
from lctrain.data.images.decode import decode
from lctrain.data.images.loader import MOST_WORKERS, choose_workers, image_eval_batches
from lctrain.data.images.store import ImageStore
from lctrain.data.images.transform import central, resize
from lctrain.data.order import SampleOrder
from lctrain.errors import ConfigError, DataError
from lctrain.ops.image_batch import IGNORE, ImageBatch
from tests.support.staged_images import (
    COUNT,
    LABELS,
    config,
    decoders,
    encoded,
    jpeg_store,
    loader_of,
    picture,
    seen,
    write_store,
)

RAW = np.random.default_rng(0).integers(0, 256, (COUNT, 12, 12, 1), dtype=np.uint8)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    folder = tmp_path_factory.mktemp("raw") / "store"
    return write_store(folder, [a.tobytes() for a in RAW], labels=LABELS, channels=1, raw_shape=(12, 12, 1))


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return jpeg_store(tmp_path_factory.mktemp("jpegs") / "store")


def one(store: ImageStore, cfg: ImagesConfig, sample: int, epoch: int, *, augment: bool = True) -> np.ndarray:
    work = Work(np.array([sample]), np.array([epoch]), np.array([augment]), step=0)
    return BatchBuilder(store, cfg=cfg, seed=3).images(work)[0].numpy()


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 8), (2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize(("kind", "crop"), [("raw", Crop.padded), ("jpegs", Crop.random_resized)])
def test_any_layout_sees_the_same_images_in_the_same_step(
    request, kind: str, crop: Crop, size: int, micro: int
) -> None:
    store, cfg = request.getfixturevalue(kind), config(crop=crop)
    order = SampleOrder(size=COUNT, seed=7, global_batch_size=8)
    ranks = [
        loader_of(store, cfg, data_rank=rank, data_size=size, micro_batch_size=micro).iterate(1, 4)
        for rank in range(size)
    ]
    for step in (1, 2, 3):  # the third begins in one epoch and ends in the next
        turns = [batches for number, batches in map(next, ranks) if number == step]
        assert {len(batches) for batches in turns} == {8 // (size * micro)}
        flat = [batch for turn in zip(*turns, strict=True) for batch in turn]
        images, labels = torch.cat([b.images for b in flat]), torch.cat([b.labels for b in flat])
        indices, epochs = order.step_indices(step).tolist(), order.step_epochs(step).tolist()
        assert labels.tolist() == [LABELS[index] for index in indices]
        for found, index, epoch in zip(images.numpy(), indices, epochs, strict=True):
            assert np.array_equal(found, one(store, cfg, index, epoch))


@pytest.mark.parametrize("crop", list(Crop))
def test_crops_change_with_epoch_sample_and_seed(jpegs: ImageStore, crop: Crop) -> None:
    cfg = config(crop=crop)
    views = {one(jpegs, cfg, 4, epoch).tobytes() for epoch in range(12)}
    # Of the 5 x 5 shifts and a mirror one comes up twice; no mirror and a mirror is all that is left without.
    assert len(views) == {Crop.random_resized: 12, Crop.padded: 11, Crop.none: 2}[crop]
    plain = config(crop=crop, flip=False)
    still = central(decode(jpegs.image(4), channels=3), size=12, fraction=0.875)
    assert np.array_equal(one(jpegs, cfg, 4, 0, augment=False), still)
    if crop is Crop.none:
        assert views == {still.tobytes(), still[:, ::-1].tobytes()}
        assert np.array_equal(one(jpegs, plain, 4, 0), still)


def test_raw_images_of_the_right_size_are_only_moved(raw: ImageStore) -> None:
    padded = np.pad(RAW, ((0, 0), (2, 2), (2, 2), (0, 0)))
    for sample in range(COUNT):
        assert np.array_equal(one(raw, config(), sample, 0, augment=False), RAW[sample])
        found = one(raw, config(), sample, 0)
        windows = [padded[sample, top : top + 12, left : left + 12] for top in range(5) for left in range(5)]
        assert any(np.array_equal(found, w) or np.array_equal(found, w[:, ::-1]) for w in windows)
    whole = config(crop=Crop.random_resized)
    assert np.array_equal(one(raw, whole, 1, 0, augment=False), RAW[1])
    assert len({one(raw, whole, 1, epoch).tobytes() for epoch in range(5)}) == 5
    # Of another size they are resized like any image.
    larger = one(raw, config(image_size=18, eval_crop=1.0), 1, 0, augment=False)
    assert np.array_equal(larger, resize(RAW[1], 18, 18))


def test_augmentation_ends_where_it_is_told_to(raw: ImageStore) -> None:
    loader = loader_of(raw, config(augment_epochs=1.5), batch=COUNT // 2)
    order = SampleOrder(size=COUNT, seed=7, global_batch_size=COUNT // 2)
    for step, (batch,) in loader_of(raw, config(augment_epochs=1.5), batch=10, micro_batch_size=10).iterate(0, 6):
        same = [np.array_equal(a, RAW[i]) for a, i in zip(batch.images.numpy(), order.step_indices(step), strict=True)]
        assert all(same) == (step >= 3)
    assert loader.accumulation == 10


def test_a_limit_leaves_empty_places(jpegs: ImageStore) -> None:
    loader = loader_of(jpegs, config(), limit=COUNT, micro_batch_size=8)
    batches = [batch for _, step in loader.iterate(0, 3) for batch in step]
    assert [batch.count for batch in batches] == [8, 8, 4]
    assert (batches[2].labels[4:] == IGNORE).all()
    assert not batches[2].images[4:].any()
    assert batches[2].images[:4].reshape(4, -1).any(dim=1).all()
    assert batches[2].labels.dtype == torch.int64
    assert batches[2].to(torch.device("cpu")).count == ImageBatch(batches[2].images, batches[2].labels).count == 4


def test_global_batch_must_divide(raw: ImageStore) -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=8"):
        loader_of(raw, config(), data_size=3)


@pytest.mark.parametrize("crop", [Crop.random_resized, Crop.padded])
def test_workers_prefetch_and_resuming_change_nothing(jpegs: ImageStore, crop: Crop) -> None:
    cfg = config(crop=crop)
    wanted = seen(loader_of(jpegs, cfg, micro_batch_size=4), 0, 7)
    assert [step for step, *_ in wanted] == [step for step in range(7) for _ in range(2)]
    for workers, prefetch, first in ((0, 2, 0), (1, 2, 0), (2, 1, 3), (2, 0, 0)):
        loader = loader_of(jpegs, cfg, micro_batch_size=4, workers=workers, prefetch=prefetch)
        assert seen(loader, first, 7) == wanted[2 * first :]
    assert seen(loader_of(jpegs, cfg, workers=1, prefetch=1), 3, 3) == []
    assert decoders() == []


def test_the_first_images_are_those_of_the_first_step(jpegs: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(crop=Crop.random_resized)
    loader = loader_of(jpegs, cfg, micro_batch_size=4)
    _, (batch, *_) = next(loader.iterate(0, 1))
    decoded = []
    monkeypatch.setattr(batch_module, "decode", lambda data, **how: decoded.append(data) or decode(data, **how))
    for count in (3, 99):
        found = loader.first(count)
        assert torch.equal(found.images, batch.images[:count])
        assert torch.equal(found.labels, batch.labels[:count])
    assert len(decoded) == 3 + 4


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 8), (3, 2), (8, 4)])
@pytest.mark.parametrize("limit", [None, 5, 1000])
def test_evaluation_sees_each_image_once(jpegs: ImageStore, size: int, micro: int, limit: int | None) -> None:
    cfg = config(crop=Crop.random_resized)
    ranks = [
        list(image_eval_batches(jpegs, cfg=cfg, data_rank=r, data_size=size, micro_batch_size=micro, max_images=limit))
        for r in range(size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    found = [(i.numpy().tobytes(), int(n)) for bs in ranks for b in bs for i, n in zip(b.images, b.labels, strict=True)]
    assert all(len(batch.images) == micro for batches in ranks for batch in batches)
    real = sorted(pair for pair in found if pair[1] != IGNORE)
    wanted = [(one(jpegs, cfg, i, 0, augment=False).tobytes(), LABELS[i]) for i in range(min(limit or COUNT, COUNT))]
    assert real == sorted(wanted)
    assert sum(batch.count for batches in ranks for batch in batches) == len(wanted)
    assert all(pixels.count(0) == len(pixels) for pixels, label in found if label == IGNORE)


def test_fast_decoding_shows_the_same_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = [picture(160, 200, seed=seed) for seed in range(6)]
    odd = encoded(pixels[0], "PNG")  # has no eighths
    store = write_store(tmp_path / "store", [*(encoded(p, quality=95) for p in pixels), odd], labels=[0] * 7)
    decoded: list[tuple[int, ...]] = []

    def watched(data: memoryview, **more) -> np.ndarray:
        decoded.append(decode(data, **more).shape[:2])
        return decode(data, **more)

    monkeypatch.setattr(batch_module, "decode", watched)
    for crop in (Crop.random_resized, Crop.none):
        exact, fast = (config(crop=crop, image_size=32, decode=how) for how in (Decode.exact, Decode.fast))
        for sample in range(7):
            for augment in (True, False):
                views = [one(store, cfg, sample, 1, augment=augment).astype(int) for cfg in (exact, fast)]
                assert np.abs(views[0] - views[1]).mean() < 5
    exact_sizes, fast_sizes = decoded[::2], decoded[1::2]
    assert {width for _, width in exact_sizes} == {200}
    assert exact_sizes[1] == (160, 200)
    assert 32 < min(exact_sizes)[0] < 160  # rows below the box are left out
    assert fast_sizes[1] == (40, 50)  # 37 rows become 32: an eighth of 160 is too few, two are enough
    assert min(fast_sizes[:12:2]) < (160, 200) == fast_sizes[12]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path, workers: int) -> None:
    images = [encoded(pixels) for pixels in (picture(40, 50, seed=seed) for seed in range(4))]
    store = write_store(tmp_path / "store", [*images[:3], images[3][:300]], labels=[0] * 4)
    with pytest.raises(DataError, match=r"'image-3' of .*store cannot be decoded .*stage"):
        list(image_eval_batches(store, cfg=config(), workers=workers, micro_batch_size=2))
    assert decoders() == []


def test_raw_pixels_of_another_size_are_refused(tmp_path: Path) -> None:
    images = [bytes(144), bytes(143)]
    store = write_store(tmp_path / "store", images, labels=[0, 0], channels=1, raw_shape=(12, 12, 1))
    with pytest.raises(DataError, match=r"images-00000\.arrow holds an image that is not 144 bytes"):
        list(image_eval_batches(store, cfg=config()))


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    cfg = config()
    assert [choose_workers(cfg, ranks) for ranks in (1, 2, 8, 100)] == [MOST_WORKERS, MOST_WORKERS, 3, 1]
    assert choose_workers(cfg, 8, raw=True) == 0
    assert choose_workers(replace(cfg, workers=5), 8, raw=True) == 5
    assert choose_workers(replace(cfg, workers=0), 8) == 0
