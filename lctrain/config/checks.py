"""The one shape of a one-field check."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from lctrain.errors import ConfigError

MISSING: Any = "???"  # OmegaConf's mark of a value that must be given, without importing OmegaConf


def require(ok: bool, name: str, value: object, rule: str, mend: str) -> None:
    """Raise ConfigError naming the field, the value, the rule and the mend unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}={value} {rule}; {mend}")


def require_finite(config: Any, path: str = "") -> None:
    """Raise ConfigError for a number that is infinite or none, anywhere in a dataclass of dataclasses."""
    for field in fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            require_finite(value, f"{name}.")
        for number in value if isinstance(value, list) else [value]:
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, name, value, "must be a finite number", "give one, or leave it out for the default")
