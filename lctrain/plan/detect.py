"""The machine at hand as a device of a plan."""

from __future__ import annotations

from dataclasses import replace

from lctrain.config.hardware import GIB, Hardware, hardware_called, load_hardware
from lctrain.config.resolve import wanted_ranks
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError
from lctrain.runtime.device import choose, host_memory_bytes


def wanted(config: TrainConfig, *, config_dir: str | None = None) -> Hardware:
    """The device a plan is for, with what the command line says of it. Raises ConfigError."""
    name = config.plan.device
    hardware = at_hand(config) if name is None else load_hardware(name, config_dir=config_dir)
    return hardware.with_overrides(config.plan, config.precision.kind)


def at_hand(config: TrainConfig) -> Hardware:
    """This machine's device with the memory it has. Raises ConfigError for one there is no file for."""
    device = choose(config.device, 0, 1)
    if device.type == "cpu":
        return cpu_of(host_memory_bytes() // (config.plan.world_size or wanted_ranks(config)))
    return named(device.name, device.total_memory_bytes())


def cpu_of(memory_bytes: int) -> Hardware:
    """A CPU core whose rank may use so much."""
    each = memory_bytes / GIB
    return replace(load_hardware("cpu"), memory_gib=round(each, 1), usable_gib=each)


def named(name: str, memory_bytes: int) -> Hardware:
    """The accelerator that calls itself `name`. Raises ConfigError when there is no file for it."""
    known = hardware_called(name)
    if known is None:
        raise ConfigError(
            f"plan.device is not given and there is no conf/hardware file for {name}; give the nearest as "
            "plan.device, or a file of your own in DIR/hardware with --config-dir DIR"
        )
    total = memory_bytes / GIB
    return replace(known, memory_gib=round(total, 1), usable_gib=min(known.usable_gib, total))
