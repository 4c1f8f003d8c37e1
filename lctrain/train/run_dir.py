"""The run directory: what a run leaves for people and for the next run."""

from __future__ import annotations

import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

from lctrain.config.plain import save as save_config
from lctrain.config.root import TrainConfig
from lctrain.errors import CheckpointError, ConfigError


def default_run_dir(recipe: str | None) -> Path:
    """outputs/<recipe>/<date>-<time>, not yet used by another run of the same second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("outputs") / (recipe or "run") / stamp
    return next(p for n in range(1000) if not (p := base.with_name(f"{stamp}-{n}" if n else stamp)).exists())


def check_free(path: Path, resume: str | None) -> None:
    """Refuse a directory that holds a finished run, or an unfinished one that would be overwritten.

    Raises ConfigError.
    """
    summary = path / "summary.json"
    if summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("status") == "completed":
        raise ConfigError(
            f"run_dir={path} holds a finished run; choose another run_dir, or train longer by giving "
            "this one as checkpoint.resume to a new run"
        )
    if (path / "config.yaml").is_file() and resume != "auto":
        raise ConfigError(
            f"run_dir={path} holds an unfinished run; add checkpoint.resume=auto to continue it, or "
            "choose another run_dir"
        )


def make_run_dir(path: Path) -> None:
    """Make the directory. Raises ConfigError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be made ({error}); give a folder in which you may write") from error


class RunDir:
    """Files of one run. Only the main rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.log = path / "log.txt"
        self.classes = path / "classes.json"

    def create(self, config: TrainConfig) -> None:
        """Make the directory and write config.yaml. Raises ConfigError where that cannot be."""
        make_run_dir(self.path)
        save_config(config, self.config)
        self.summary.unlink(missing_ok=True)

    def drop_metrics_after(self, step: int) -> None:
        """Forget records after `step`, so that a continued run has each step once."""
        if self.metrics.is_file():
            kept = [record for record in read_records(self.metrics) if record["step"] <= step]
            _replace(self.metrics, "".join(f"{json.dumps(record)}\n" for record in kept))

    def write_classes(self, names: list[str]) -> None:
        """Remember what labels mean, which the images' cache may not for ever."""
        _replace(self.classes, json.dumps(names, ensure_ascii=False) + "\n")

    def read_classes(self) -> list[str]:
        """The names of classes in the order of labels. Raises CheckpointError when they are not there."""
        try:
            return list(json.loads(self.classes.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.classes} cannot be read ({error}); put the file with the list of class names back"
            ) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, aside and renamed."""
        _replace(self.summary, json.dumps(json_ready(summary), indent=1) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json of a run directory, or {} when there is none."""
    file = path / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def json_ready(value: Any) -> Any:
    """`value` with null where a number is not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(metrics: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, but for lines that a crash cut short or that are no record."""
    records = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _replace(path: Path, text: str) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
