"""`python -m lctrain evaluate`: run_dir=DIR for a run's checkpoint, or recipe=... model.path=FOLDER."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lctrain.config.compose import compose_config
from lctrain.config.data import DocumentsConfig
from lctrain.config.launch import LaunchConfig
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_OK, ConfigError
from lctrain.launch.find import find_place
from lctrain.launch.start import start
from lctrain.train.run_dir import default_run_dir
from lctrain.verbs.saved import saved_config, take
from lctrain.verbs.train import resolve_for, show


def run(command: Any) -> int:
    """Evaluate on held-out data under the run's layout (or another, given by parallel=...)."""
    config = _config(command)
    if command.show_config:
        return show(config)
    if isinstance(config.data, DocumentsConfig) and not (config.data.held_out or config.data.eval_path):
        raise ConfigError(
            "nothing to evaluate on: data.held_out is 0 and data.eval_path is not set; give "
            "data.eval_path=PATH, or the data.held_out the run was trained with"
        )
    place = find_place(config.launch)
    resolved = resolve_for(config, place)
    if place.ranks.launcher is not None:
        from lctrain.worker import work

        return work("evaluate", config, place.ranks)
    run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe)
    code = start("evaluate", resolved, run_dir, node=place.node)
    if code == EXIT_OK:
        print(f"run dir: {run_dir}", flush=True)
    return code


def _config(command: Any) -> TrainConfig:
    given, rest = take(command.overrides, "run_dir")
    if given is None or not (Path(given) / "config.yaml").is_file():
        if given is not None and not any(o.startswith("recipe=") for o in rest):
            raise ConfigError(
                f"run_dir={given} has no config.yaml; give a run's directory, or recipe=NAME "
                "model.path=FOLDER to evaluate a model folder"
            )
        return compose_config(command.overrides, config_dir=command.config_dir)
    config = saved_config(given, rest)
    config.run_dir = given
    if not any(o.startswith("launch") for o in rest):
        # The platform that started the run need not be where it is evaluated.
        kept = {name: getattr(config.launch, name) for name in ("default_ranks", "nproc_per_node", "timeout_s")}
        config.launch = LaunchConfig(**kept)
    if not any(o.startswith("checkpoint.resume=") for o in rest):
        # What the run itself continued from is not what it became.
        config.checkpoint.resume = "auto"
    return config
