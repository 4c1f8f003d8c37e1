"""`python -m lctrain verify ...`: the job's layout, shrunk, against one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lctrain.config.compose import compose_config
from lctrain.config.language_checks import with_layers
from lctrain.config.model import CausalLMConfig
from lctrain.config.resolve import check_required
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_NO, EXIT_OK, ConfigError
from lctrain.launch.find import find_place
from lctrain.launch.start import start
from lctrain.train.run_dir import default_run_dir
from lctrain.verbs.train import resolve_for, show


def run(command: Any) -> int:
    """Compare the layout with one rank; exit 0 when equal, 3 when not."""
    config = shrink(compose_config(command.overrides, config_dir=command.config_dir))
    if command.show_config:
        return show(config)
    place = find_place(config.launch)
    resolved = resolve_for(config, place)
    if place.ranks.launcher is not None:
        from lctrain.worker import work

        return work("verify", config, place.ranks)
    run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(f"{config.recipe}-verify")
    code = start("verify", resolved, run_dir, node=place.node)
    if code in (EXIT_OK, EXIT_NO):
        print(f"run dir: {run_dir}", flush=True)
    return code


def shrink(config: TrainConfig) -> TrainConfig:
    """The same widths, heads, vocabulary and packing with few layers, short sequences and random weights."""
    if not isinstance(config.model, CausalLMConfig):
        raise ConfigError(
            f"verify proves attention layouts and model={config.model.kind} has no attention; the project's "
            "parity tests compare the layouts of image models"
        )
    check_required(config)
    data = config.documents
    length = min(config.verify.max_length, data.max_length)
    shallow = with_layers(config, config.verify.layers)
    return replace(
        shallow, data=replace(data, max_length=length, tokenizer=data.tokenizer or config.language_model.path)
    )
