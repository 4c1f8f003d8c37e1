"""A grid of training images with their class names, for a person to look at before the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COLUMNS, MOST = 8, 32


def draw_samples(images: torch.Tensor, labels: Sequence[int], classes: Sequence[str], path: Path) -> None:
    """Write the first images [B, H, W, C] uint8, as the model will see them, under the names of their labels."""
    from matplotlib.figure import Figure

    count = min(len(images), MOST)
    rows = -(-count // COLUMNS)
    figure = Figure(figsize=(COLUMNS * 1.3, rows * 1.5), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, image, label in zip(axes, images[:count], labels, strict=False):
        axis.imshow(image.squeeze(-1).numpy(), cmap="gray" if image.shape[-1] == 1 else None, vmin=0, vmax=255)
        axis.set_title(classes[label] if label < len(classes) else str(label), fontsize=8)
    figure.savefig(path, dpi=120)
