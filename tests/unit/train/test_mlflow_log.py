"""MLflow's records, read back from a file store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lctrain.config.compose import compose_config
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError
from lctrain.train.callbacks.base import StepRecord
from lctrain.train.callbacks.mlflow import MlflowLog, _client
from lctrain.train.checkpoint import TrainState


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    """A job that logs to a folder store, every second step."""
    store = f"logging.mlflow.uri={folder / 'store'}"
    return compose_config(["recipe=resnet8_fashion_mnist", store, "logging.every_steps=2", *overrides])


def record(step: int, *, own: float = 0.0) -> StepRecord:
    """A step whose loss is 1 / step."""
    return StepRecord(
        step=step, epoch=step / 2, loss=1 / step, own_loss=own, grad_norm=1.0, lr=0.1 * step, unit="samples", units=8.0,
        step_time_s=1.0, units_per_s=8.0, mfu=None, peak_memory_bytes=1, data_wait_s=0.0, skipped=False,
    )  # fmt: skip


def run(config: TrainConfig, folder: Path, steps: range, *, status: str, rank: int | None = None) -> None:
    """A run's life in the callback, with an evaluation after every second step."""
    folder.mkdir(exist_ok=True)
    log = MlflowLog(config, folder, rank=rank, report=pytest.fail)
    log.start(TrainState(step=steps.start - 1), 9)
    for step in steps:
        log.step_end(record(step, own=step + (rank or 0)))
        if step % 2 == 0:
            log.evaluated(step, {"eval_loss": 2.0 / step, "top1": 0.1 * step})
    log.close(status)


def stored(config: TrainConfig) -> tuple[Any, list[Any]]:
    """A client of the store, and its runs by name."""
    client = _client(config.logging.mlflow)
    experiment = client.get_experiment_by_name("lctrain")
    assert experiment is not None
    return client, sorted(client.search_runs([experiment.experiment_id]), key=lambda r: r.info.run_name)


def history(client: Any, run: Any, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric."""
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]


def test_a_job_is_one_run_also_when_it_is_continued(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, tmp_path / "first", range(1, 5), status="preempted")
    client, (only,) = stored(config)
    assert only.info.status == "KILLED"
    run(config, tmp_path / "first", range(5, 7), status="completed")
    client, (only,) = stored(config)
    assert (only.info.run_name, only.info.status) == ("first", "FINISHED")
    assert history(client, only, "loss") == [(s, pytest.approx(1 / s)) for s in (1, 2, 4, 6)]
    assert history(client, only, "lr")[-1] == (6, pytest.approx(0.6))
    assert history(client, only, "samples_per_s")[0] == (1, 8.0)
    assert history(client, only, "eval_loss") == [(s, pytest.approx(2 / s)) for s in (2, 4, 6)]
    assert history(client, only, "top1") == [(s, pytest.approx(0.1 * s)) for s in (2, 4, 6)]
    params = only.data.params
    assert (params["optim.lr"], params["model.depth"], params["optim.kind"]) == ("0.2", "8", "sgd")
    assert "preset" not in params
    # A new job in the same store is another run.
    run(config, tmp_path / "second", range(1, 3), status="failed")
    assert [r.info.status for r in stored(config)[1]] == ["FINISHED", "FAILED"]


def test_one_run_a_rank_with_its_own_losses(tmp_path: Path) -> None:
    config = config_of(tmp_path, "logging.mlflow.per_rank=true")
    for rank in (0, 1):
        run(config, tmp_path / "job", range(1, 3), status="completed", rank=rank)
    client, runs = stored(config)
    assert [r.info.run_name for r in runs] == ["job-rank-0", "job-rank-1"]
    assert [r.data.params["rank"] for r in runs] == ["0", "1"]
    assert [history(client, r, "loss") for r in runs] == [[(1, 1.0), (2, 2.0)], [(1, 2.0), (2, 3.0)]]


def test_a_store_that_cannot_be_used_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    log = MlflowLog(config_of(tmp_path), tmp_path, rank=None, report=pytest.fail)
    with pytest.raises(ConfigError, match=r"logging\.mlflow\.uri=.*store cannot be used .*; give a folder"):
        log.start(TrainState(), 9)
    log.close("failed")


def test_a_store_that_fails_later_costs_the_run_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    log = MlflowLog(config_of(tmp_path), tmp_path, rank=None, report=said.append)
    log.start(TrainState(), 9)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no folder any more")
    for step in (1, 2):
        log.step_end(record(step))
        log.evaluated(step, {"top1": 0.1})
    log.close("completed")
    assert len(said) == 1
    assert said[0].startswith(f"warning: logging.mlflow.uri={tmp_path / 'store'} failed (")
    assert said[0].endswith("; this run goes on without it")


def test_a_server_that_does_not_answer_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    log = MlflowLog(
        config_of(tmp_path, "logging.mlflow.uri=http://127.0.0.1:9"), tmp_path, rank=None, report=pytest.fail
    )
    with pytest.raises(ConfigError, match=r"uri=http://127\.0\.0\.1:9 cannot be used .*retries.*or a server"):
        log.start(TrainState(), 9)
