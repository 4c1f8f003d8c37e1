"""`-m`: Hydra's sweepers over whole jobs, one after another."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any

from lctrain.config.compose import conf_dir, explain, options, to_config
from lctrain.config.registry import register
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_OK, ConfigError, LctrainError
from lctrain.launch.find import find_place
from lctrain.runtime.process import read_ranks
from lctrain.train.run_dir import read_summary


class _Stop(BaseException):
    """Carries an error past Hydra, which would keep an Exception and go on with the next job."""

    def __init__(self, error: LctrainError) -> None:
        self.error = error


class JobFailed(LctrainError):
    """A job of the sweep ended with a code other than 0; the sweep ends with the same code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def sweep(command: Any) -> int:
    """Run every job of a sweep; each has a run directory of its own under one folder.

    Raises ConfigError for overrides that do not compose, JobFailed when a job fails.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if read_ranks().launcher is not None:
        raise _inside("torchrun or accelerate launch")
    register()
    overrides = [o for o in command.overrides if not o.startswith("run_dir=")]
    root = next((o.split("=", 1)[1] for o in command.overrides if o.startswith("run_dir=")), None)
    recipe = next((o.split("=", 1)[1] for o in overrides if o.startswith("recipe=")), "")
    if not recipe:
        raise ConfigError(f"recipe is not given; choose one: {', '.join(options('recipe', command.config_dir))}")
    folder = root or f"outputs/{recipe.replace(',', '+')}/sweep-{datetime.now():%Y%m%d-%H%M%S}"
    argv = [
        "lctrain", "--multirun", *overrides, f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=${hydra.job.num}",
        "hydra.output_subdir=null", "hydra.job.chdir=false", "hydra/job_logging=none",
    ]  # fmt: skip
    if command.config_dir:
        argv.append(f"hydra.searchpath=[file://{Path(command.config_dir).expanduser().resolve()}]")
    # Hydra would print its own errors and exit 1; with this it raises them.
    before, sys.argv, os.environ["HYDRA_FULL_ERROR"] = sys.argv, argv, "1"
    try:
        job = wraps(_job)(partial(_job, command))  # Hydra asks a task function for its name
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_dir=command.config_dir) from error
    except _Stop as stop:
        raise stop.error from stop
    finally:
        sys.argv = before
        _forget_unused(Path(folder))
    print(f"sweep dir: {folder}", flush=True)
    return EXIT_OK


def _inside(launcher: str) -> ConfigError:
    return ConfigError(f"-m starts whole jobs and cannot run inside {launcher}; start it with python -m lctrain -m")


def _forget_unused(folder: Path) -> None:
    """Remove a sweep's folder in which no job began: Hydra makes it before anything is checked."""
    if folder.is_dir() and {p.name for p in folder.rglob("*") if p.is_file()} <= {"multirun.yaml"}:
        shutil.rmtree(folder)


def _job(command: Any, raw: Any) -> float:
    """One job; its last loss is what an optimizing sweeper minimises. Raises _Stop when the sweep must end."""
    try:
        return _plan(raw, command.config_dir) if command.verb == "plan" else _run(raw)
    except LctrainError as error:
        raise _Stop(error) from error


def _own(raw: Any) -> TrainConfig:
    """The job's config, with the directory that the sweep gives it."""
    from hydra.core.hydra_config import HydraConfig

    config = to_config(raw)
    config.run_dir = HydraConfig.get().runtime.output_dir
    return config


def _plan(raw: Any, config_dir: str | None) -> float:
    """One plan, whether it fits or not; its predicted seconds a step."""
    from lctrain.verbs.plan import FILE, plan_config

    config = _own(raw)
    plan_config(config, config_dir=config_dir)
    record = json.loads((Path(str(config.run_dir)) / FILE).read_text(encoding="utf-8"))
    return float(record["step_time_s"])


def _run(raw: Any) -> float:
    from lctrain.verbs.train import run_config

    config = _own(raw)
    assert config.run_dir is not None
    place = find_place(config.launch)
    if place.ranks.launcher is not None:
        raise _inside(f"ranks that {place.ranks.launcher} started")
    code = run_config("train", config, place)
    if code != EXIT_OK:
        raise JobFailed(f"the job in {config.run_dir} ended with exit code {code}; the sweep stops here", code)
    loss = read_summary(Path(config.run_dir))["last_loss"]
    return math.nan if loss is None else float(loss)
