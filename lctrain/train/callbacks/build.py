"""The callbacks of a config."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

from lctrain.config.root import LoggingConfig, TrainConfig
from lctrain.errors import ConfigError
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.process import Ranks
from lctrain.train.callbacks.base import Callback
from lctrain.train.callbacks.console import Console
from lctrain.train.callbacks.metrics_file import MetricsFile
from lctrain.train.callbacks.planned import Planned
from lctrain.train.callbacks.profiler import Profiler
from lctrain.train.callbacks.tensorboard import TensorBoard
from lctrain.train.run_dir import RunDir


def check_logs(config: LoggingConfig) -> None:
    """Raise ConfigError for a log whose optional package is not installed, or whose store does not answer."""
    for field, wanted, package, extra, off in (
        ("pictures=true", config.pictures, "matplotlib", "vision", "pictures=false"),
        (f"mlflow.uri={config.mlflow.uri}", config.mlflow.uri is not None, "mlflow", "mlflow", "mlflow.uri=null"),
    ):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"logging.{field} needs {package}, which is not installed; pip install 'lctrain[{extra}]', or set "
                f"logging.{off}"
            )
    if config.mlflow.uri is not None:
        from lctrain.train.callbacks.mlflow import check_store

        check_store(config.mlflow)


def build_callbacks(
    config: TrainConfig, run_dir: RunDir, report: Callable[[str], None], *, ranks: Ranks, mesh: Mesh
) -> list[Callback]:
    """What this rank listens with: nearly everything on the main one.

    A progress bar needs a terminal; elsewhere there are lines.
    """
    logging = config.logging
    callbacks: list[Callback] = []
    rank = ranks.rank
    if ranks.is_main:
        every = logging.every_steps
        callbacks.append(MetricsFile(run_dir.metrics, every_steps=every))
        callbacks.append(Console(report, every_steps=every, bar=logging.progress and sys.stdout.isatty()))
        if config.plan.at_start:
            callbacks.append(Planned(run_dir.config, mesh=mesh, ranks_here=ranks.local_world_size, report=report))
        if logging.tensorboard:
            callbacks.append(TensorBoard(run_dir.path / "tensorboard", every_steps=every))
        if logging.pictures:
            from lctrain.train.callbacks.curves import Curves

            callbacks.append(Curves(run_dir.metrics, run_dir.path / "curves.png"))
    if logging.profile_steps:
        callbacks.append(
            Profiler(
                run_dir.path / "profile", device=mesh.device, rank=rank, steps=logging.profile_steps, report=report
            )
        )
    if logging.mlflow.uri is not None and (rank == 0 or logging.mlflow.per_rank):
        from lctrain.train.callbacks.mlflow import MlflowLog

        callbacks.append(MlflowLog(config, run_dir.path, rank=rank if logging.mlflow.per_rank else None, report=report))
    return callbacks
