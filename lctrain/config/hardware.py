"""Devices a plan knows: conf/hardware/NAME.yaml, and a folder of one's own beside it. No torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lctrain.config.compose import conf_dir
from lctrain.config.plan import PlanConfig
from lctrain.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, and how it is connected.

    type: cuda, npu or cpu. memory_gib: installed; usable_gib: what one process can allocate. peak_tflops: dense, by
    dtype; a dtype that is not there cannot be computed in. link_gb_s: GB/s one way to the other devices of a node,
    network_gb_s to those of other nodes. launch_us: the shortest an operation takes. context_gib: what the driver and
    kernels take before the first tensor; communicator_mib: buffers of one communicator; rounding: bytes an allocation
    is rounded up to; softmax_statistics: fp32 numbers a query and head that fused attention's operator gives. refused:
    why training is not possible, if it is not.
    """

    name: str
    title: str
    type: str
    memory_gib: float
    usable_gib: float
    peak_tflops: dict[str, float]
    bandwidth_tb_s: float
    link_gb_s: float
    latency_us: float
    network_gb_s: float = 50.0
    devices_per_node: int = 8
    launch_us: float = 0.0
    context_gib: float = 0.0
    communicator_mib: float = 0.0
    rounding: int = 1
    softmax_statistics: int = 1
    refused: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What one process can allocate."""
        return int(self.usable_gib * GIB)

    def with_overrides(self, plan: PlanConfig, dtype: str) -> Hardware:
        """The device with what the command line says of it. Raises ConfigError when it cannot train in `dtype`."""
        check_trains(self, dtype)
        names = ("usable_gib", "bandwidth_tb_s", "link_gb_s", "latency_us")
        given = {name: value for name in names if (value := getattr(plan, name)) is not None}
        peaks = self.peak_tflops | ({dtype: plan.peak_tflops} if plan.peak_tflops else {})
        return replace(self, peak_tflops=peaks, **given)


def hardware_names(config_dir: str | None = None) -> list[str]:
    """Every device there is a file for."""
    return sorted({path.stem for folder in _folders(config_dir) for path in folder.glob("*.yaml")})


def load_hardware(name: str, *, config_dir: str | None = None) -> Hardware:
    """The device of conf/hardware/NAME.yaml. Raises ConfigError with the nearest names, or what a file lacks."""
    known = hardware_names(config_dir)
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"plan.device={name} is not a known device; {hint}known are {', '.join(known)}")
    path = next(p for folder in reversed(_folders(config_dir)) if (p := folder / f"{name}.yaml").is_file())
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    known_fields = {f.name for f in fields(Hardware)} - {"name"}
    for key in raw:
        if key not in known_fields:
            raise ConfigError(
                f"{path}: {key} is not a field of a device; its fields are {', '.join(sorted(known_fields))}"
            )
    try:
        return Hardware(name=name, **raw)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; give every field another device has") from error


@lru_cache
def hardware_called(device_name: str) -> Hardware | None:
    """The device that the vendor calls so; None when there is no file for it."""
    return next((load_hardware(file) for part, file in _CALLED.items() if part in device_name), None)


# A part of the vendor's name of a device, and its file.
_CALLED = {
    "H200": "h200",
    "H100": "h100",
    "H800": "h100",
    "A100": "a100",
    "A800": "a100",
    "V100": "v100",
    "Ascend910B1": "ascend910b1",
    "Ascend910B2": "ascend910b2",
    "Ascend910B3": "ascend910b3",
    "Ascend910_93": "ascend910c",
    "Ascend910A": "ascend910a",
}


def check_trains(hardware: Hardware, dtype: str) -> None:
    """Raise ConfigError for a device that cannot train, or not in `dtype`."""
    if hardware.refused:
        raise ConfigError(f"plan.device={hardware.name}: {hardware.refused}")
    if dtype not in hardware.peak_tflops:
        can = [d for d in ("bf16", "fp16", "fp32") if d in hardware.peak_tflops]
        raise ConfigError(
            f"precision={dtype} but {hardware.title} has no {dtype} arithmetic; use precision={' or '.join(can)}"
        )


def _folders(config_dir: str | None) -> list[Path]:
    own = [Path(config_dir).expanduser() / "hardware"] if config_dir else []
    return [conf_dir() / "hardware", *own]
