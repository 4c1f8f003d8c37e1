"""`python -m lctrain [train]`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lctrain.config.compose import compose_config
from lctrain.config.plan import PlanConfig
from lctrain.config.resolve import Resolved, resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_BUG, EXIT_OK, EXIT_USER, ConfigError
from lctrain.launch.accelerate_env import check_accelerate
from lctrain.launch.find import find_place
from lctrain.launch.place import Place
from lctrain.launch.start import start
from lctrain.train.run_dir import check_free, default_run_dir


def run(command: Any) -> int:
    """Compose, check, start (or be) the ranks. `command`: a cli.Command."""
    if command.multirun:
        from lctrain.verbs.sweep import sweep

        return sweep(command)
    config = compose_config(command.overrides, config_dir=command.config_dir)
    if command.show_config:
        return show(config)
    return run_config("train", config, find_place(config.launch))


def check_no_question(config: TrainConfig) -> None:
    """Raise ConfigError when the plan verb is asked something of a job that runs."""
    default = PlanConfig()
    for name in ("world_size", "layouts", "max_length", "fit", "calibrate", "dataset_size", "price_per_hour"):
        value = getattr(config.plan, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"plan.{name}={str(value).lower()} is a question to plan and has no effect on a job that runs; "
                "write python -m lctrain plan ..., or leave it out"
            )


def show(config: TrainConfig) -> int:
    """Print the resolved configuration as YAML."""
    import yaml

    from lctrain.config.plain import to_plain

    print(yaml.safe_dump(to_plain(config), sort_keys=False), end="")
    return EXIT_OK


def resolve_for(config: TrainConfig, place: Place) -> Resolved:
    """Cross-field checks against whoever started this process; says what a platform's variables became.

    Raises ConfigError.
    """
    check_no_question(config)
    resolved = resolve(config, world_size=place.world_size, launcher=place.starter)
    if place.starter == "accelerate":
        check_accelerate(config, resolved.sizes, os.environ)
    if place.note is not None:
        print(f"launch: {place.note}", flush=True)
    return resolved


def run_config(verb: str, config: TrainConfig, place: Place) -> int:
    """Run a typed config: as one of an external launcher's ranks, or by starting ranks."""
    resolved = resolve_for(config, place)
    if config.run_dir is not None and place.ranks.is_main:
        check_free(Path(config.run_dir), config.checkpoint.resume)
    if place.ranks.launcher is not None:
        from lctrain.worker import work

        return work(verb, config, place.ranks)
    run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe)
    code = start(verb, resolved, run_dir, node=place.node)
    # On several nodes the first one speaks; after a refusal there is no directory to name.
    if code not in (EXIT_USER, EXIT_BUG) or run_dir.is_dir():
        print(f"run dir: {run_dir}", flush=True)
    return code
