"""`python -m lctrain doctor [device=auto|npu|cuda|cpu]`: can this machine train, and if not, what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lctrain.config.root import Device
from lctrain.doctor.facts import gather
from lctrain.doctor.report import examine, has_fault, lines
from lctrain.errors import EXIT_NO, EXIT_OK, ConfigError


def run(command: Any) -> int:
    """Print every finding; 3 when one is a fault. `command`: a cli.Command."""
    if command.show_config or command.config_dir:
        raise ConfigError("doctor reads no configuration; it has no --print-config and no --config-dir")
    facts = gather(wanted(command.overrides))
    findings = examine(facts)
    for line in lines(facts.kind, findings):
        print(line, flush=True)
    return EXIT_NO if has_fault(findings) else EXIT_OK


def wanted(overrides: Sequence[str]) -> Device:
    """The device to check. Raises ConfigError for any other override."""
    device = Device.auto
    for word in overrides:
        key, _, value = word.partition("=")
        if key != "device":
            raise ConfigError(
                f"{word} has no effect on doctor, which takes device=auto, npu, cuda or cpu; leave it out"
            )
        if value not in Device.__members__:
            raise ConfigError(f"device={value} must be one of auto, npu, cuda, cpu; leave it out for auto")
        device = Device[value]
    return device
