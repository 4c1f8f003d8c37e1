"""Verbs about a run that exists: its saved config, with the command line on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lctrain.config.compose import overlay
from lctrain.config.plain import load
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError


def take(overrides: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The last value of `key` among `overrides`, and the others."""
    values = [o.split("=", 1)[1] for o in overrides if o.startswith(f"{key}=")]
    return (values[-1] if values else None), [o for o in overrides if not o.startswith(f"{key}=")]


def saved_config(run_dir: str, overrides: Sequence[str]) -> TrainConfig:
    """The config `run_dir` was trained with and `overrides` on top. Raises ConfigError when there is none."""
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"run_dir={run_dir} has no config.yaml; give the directory of a run")
    return overlay(load(path), overrides)
