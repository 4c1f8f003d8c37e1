"""Loss and accuracy over the steps of a whole run, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lctrain.train.callbacks.base import Callback
from lctrain.train.run_dir import read_records


class Curves(Callback):
    """Draws curves.png from metrics.jsonl when the run ends, so that a continued run shows all of it."""

    def __init__(self, metrics: Path, picture: Path) -> None:
        self._metrics, self._picture = metrics, picture

    def close(self, status: str) -> None:
        """Draw, if there is anything to."""
        if records := read_records(self._metrics):
            draw_curves(records, self._picture)


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Training and validation loss, and accuracies where there are any, of the records of metrics.jsonl."""
    from matplotlib.figure import Figure

    accuracies = [name for name in ("top1", "top5", "ema_top1") if any(name in r for r in records)]
    figure = Figure(figsize=(10 if accuracies else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if accuracies else 1, squeeze=False)[0]
    for name, label in (("loss", "training"), ("eval_loss", "validation")):
        _plot(axes[0], records, name, label)
    axes[0].set(xlabel="step", ylabel="loss")
    for name in accuracies:
        _plot(axes[1], records, name, name)
    if accuracies:
        axes[1].set(xlabel="step", ylabel="accuracy on validation images")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)


def _plot(axis: Any, records: list[dict[str, Any]], name: str, label: str) -> None:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else None, markersize=3)
