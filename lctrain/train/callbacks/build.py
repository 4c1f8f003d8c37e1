"""The callbacks of a config."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lctrain.config.root import LoggingConfig
from lctrain.train.callbacks.base import Callback
from lctrain.train.callbacks.console import Console
from lctrain.train.callbacks.metrics_file import MetricsFile
from lctrain.train.callbacks.tensorboard import TensorBoard
from lctrain.train.run_dir import RunDir


def build_callbacks(config: LoggingConfig, run_dir: RunDir, report: Callable[[str], None]) -> list[Callback]:
    """What the main rank listens with. A progress bar needs a terminal; elsewhere there are lines."""
    callbacks: list[Callback] = [
        MetricsFile(run_dir.metrics, every_steps=config.every_steps),
        Console(report, every_steps=config.every_steps, bar=config.progress and sys.stdout.isatty()),
    ]
    if config.tensorboard:
        callbacks.append(TensorBoard(run_dir.path / "tensorboard", every_steps=config.every_steps))
    return callbacks
