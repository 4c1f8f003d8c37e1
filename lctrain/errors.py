"""What a user can mend. The command line prints the message alone and exits with `exit_code`.

A message names the field, the value, the rule it breaks and what to change.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_NO = 3
EXIT_PREEMPTED = 75
EXIT_ECHO = 76  # a rank that ended because another one failed; the launcher reports the other's code


class LctrainError(ValueError):
    """Base of every error a user can mend by changing input or environment."""

    exit_code = EXIT_USER


class ConfigError(LctrainError):
    """A configuration field, or a combination of fields, that cannot work."""


class DataError(LctrainError):
    """Data that is missing, empty or malformed."""


class ModelError(LctrainError):
    """A model folder that is incomplete, or a model whose features a layout cannot honour."""


class CheckpointError(LctrainError):
    """A checkpoint that is missing, incomplete or belongs to another model."""


class DeviceError(LctrainError):
    """A device that is absent or too small for what was asked."""


class TrainingStopped(RuntimeError):
    """Training cannot go on (for example: too many non-finite steps in a row). Exit code 1."""
