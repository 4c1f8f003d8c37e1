"""Sample images and curves as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lctrain.train.callbacks.curves import Curves, draw_curves
from lctrain.train.samples import draw_samples


def png(path: Path) -> np.ndarray:
    """Pixels of a PNG file, [H, W, 3]."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(("count", "channels", "rows"), [(3, 1, 1), (9, 3, 2), (40, 3, 4)])
def test_samples_are_a_grid_of_at_most_32(count: int, channels: int, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "samples.png"
    images = torch.zeros(count, 8, 8, channels, dtype=torch.uint8)
    images[..., 0] = 128  # grey, or a dark red
    draw_samples(images, [i % 3 for i in range(count)], ["shirt", "boot"], path)
    pixels = png(path)
    assert pixels.shape == (180 * rows, 1248, 3)
    shown = (pixels == ((128, 128, 128) if channels == 1 else (128, 0, 0))).all(-1).mean()
    assert shown == pytest.approx(0.76 * min(count, 32) / (8 * rows), rel=0.15)
    assert (pixels.sum(-1) < 200).any()  # names


def test_curves_of_a_run(tmp_path: Path) -> None:
    records = [{"step": s, "loss": 1 / s} for s in range(1, 50)]
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    metrics.write_text("")
    Curves(metrics, picture).close("failed")
    assert not picture.exists()
    metrics.write_text('{"step": 1, "loss": 1.0}\n{"step": 1, "eval_loss": 1.0, "top1": 0.5, "top5": 1.0}\n')
    Curves(metrics, picture).close("completed")
    assert png(picture).shape == (480, 1200, 3)
    metrics.write_text(metrics.read_text() + '{"step": 2, "lo')  # the disk was full
    Curves(metrics, picture).close("completed")
    assert png(picture).shape == (480, 1200, 3)
    draw_curves(records, picture)
    assert png(picture).shape == (480, 720, 3)
    assert len(np.unique(png(picture).reshape(-1, 3), axis=0)) > 20
