"""Typed config <-> plain mappings (YAML). Workers read what the command line resolved, without Hydra."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from lctrain.config.registry import GROUPS, classes
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts, enums to their names; the rest as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def from_plain(data: dict[str, Any]) -> TrainConfig:
    """Build the typed config; runs every one-field check.

    Raises ConfigError for a key, a kind or an enum member that does not exist.
    """
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(TrainConfig)
    for name, value in data.items():
        if name not in hints:
            raise ConfigError(f"{name} is not a field of the configuration; remove it")
        cls = _group_class(name, value) if name in GROUPS else hints[name]
        values[name] = _convert(cls, value, name)
    return TrainConfig(**values)


def _group_class(group: str, value: dict[str, Any]) -> type:
    known = classes(group)
    kind = value.get("kind")
    if kind not in known:
        raise ConfigError(f"{group}.kind={kind} is unknown; it is one of {', '.join(known)}")
    return known[kind]


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value not in hint.__members__:
            raise ConfigError(f"{name}={value} is unknown; it is one of {', '.join(hint.__members__)}")
        return hint[value]
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, name)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _dataclass(cls: type, value: dict[str, Any], name: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]} is not a field of {name}; its fields are {', '.join(hints)}")
    return cls(**{k: _convert(hints[k], v, f"{name}.{k}") for k, v in value.items()})


def save(config: TrainConfig, path: Path) -> None:
    """Write the config as YAML, aside and renamed."""
    aside = path.with_suffix(".tmp")
    aside.write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
    aside.replace(path)


def load(path: Path) -> TrainConfig:
    """Read what `save` wrote."""
    return from_plain(yaml.safe_load(path.read_text(encoding="utf-8")))
