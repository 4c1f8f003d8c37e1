"""MLflow: parameters, the loss of every logged step, and the metrics of every evaluation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lctrain.config.plain import to_plain
from lctrain.config.root import MlflowConfig, TrainConfig
from lctrain.errors import ConfigError
from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_LONGEST = 500  # characters a parameter may have on every server
_STATUS = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


def check_store(config: MlflowConfig) -> None:
    """Raise ConfigError when the store does not answer."""
    with _explained(config):
        _client(config).get_experiment_by_name(config.experiment)


class MlflowLog(Callback):
    """One MLflow run, named after the run directory; a continued run is continued there too.

    rank: for a run of this rank's own, with its own losses; None for the one of the job. A store that fails once
    training runs is said to `report` and written to no more: the numbers are in metrics.jsonl too.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, *, rank: int | None, report: Callable[[str], None]) -> None:
        self._config, self._rank = config, rank
        self._every = config.logging.every_steps
        self._note = run_dir / ("mlflow-run" if rank is None else f"mlflow-run-{rank}")
        self._name = run_dir.name if rank is None else f"{run_dir.name}-rank-{rank}"
        self._report, self._lost = report, False
        self._client: MlflowClient | None = None
        self._run = ""

    def start(self, state: TrainState, total_steps: int) -> None:
        """Open the run, or open it again. Raises ConfigError when the store does not answer."""
        with _explained(self._config.logging.mlflow):
            self._client = _client(self._config.logging.mlflow)
            self._run = self._open(self._client, resumed=state.step > 0)

    def step_end(self, record: StepRecord) -> None:
        """The loss of every logged step, and the speed."""
        if record.step % self._every == 0 or record.step == 1:
            loss = record.loss if self._rank is None else record.own_loss
            self._log({"loss": loss, "lr": record.lr, f"{record.unit}_per_s": record.units_per_s}, record.step)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Validation loss and accuracy."""
        self._log(metrics, step)

    def close(self, status: str) -> None:
        """End the run."""
        if self._client is not None and self._run:
            with self._survived():
                self._client.set_terminated(self._run, status=_STATUS[status])

    def _open(self, client: MlflowClient, *, resumed: bool) -> str:
        if resumed and self._note.is_file():
            run = self._note.read_text(encoding="utf-8").strip()
            client.update_run(run, status="RUNNING")
            return run
        name = self._config.logging.mlflow.experiment
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        run = client.create_run(experiment, run_name=self._name).info.run_id
        self._note.write_text(f"{run}\n", encoding="utf-8")
        for key, value in _flat(to_plain(self._config)):
            client.log_param(run, key, str(value)[:_LONGEST])
        if self._rank is not None:
            client.log_param(run, "rank", self._rank)
        return run

    def _log(self, values: dict[str, float], step: int) -> None:
        """All of a step in one request."""
        from mlflow.entities import Metric

        if self._lost:
            return
        assert self._client is not None
        now = round(1000 * time.time())
        with self._survived():
            self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in values.items()])

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Training is worth more than its log."""
        try:
            yield
        except Exception as error:  # as in _explained
            if not self._lost:
                uri = self._config.logging.mlflow.uri
                self._report(f"warning: logging.mlflow.uri={uri} failed ({error}); this run goes on without it")
            self._lost = True


@contextmanager
def _explained(config: MlflowConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the client raises whatever its transport does
        raise ConfigError(
            f"logging.mlflow.uri={config.uri} cannot be used ({error}); give a folder you may write or a server that "
            "answers, or null"
        ) from error


def _client(config: MlflowConfig) -> MlflowClient:
    assert config.uri is not None
    uri = config.uri
    if "://" not in uri:
        # MLflow keeps folders working for those who say that they mean them.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = Path(uri).expanduser().resolve().as_uri()
    # Its seven attempts of two minutes would keep all ranks waiting.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        elif item is not None:
            yield prefix + key, item
