"""The one shape of a one-field check."""

from __future__ import annotations

from typing import Any

from lctrain.errors import ConfigError

MISSING: Any = "???"  # OmegaConf's mark of a value that must be given, without importing OmegaConf


def require(ok: bool, name: str, value: object, rule: str, mend: str) -> None:
    """Raise ConfigError naming the field, the value, the rule and the mend unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}={value} {rule}; {mend}")
