"""Everything the checks look at, gathered once."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lctrain.config.root import Device, LaunchConfig
from lctrain.doctor.probe import Card, Probe, run_probe
from lctrain.runtime.ascend import Packages, read_packages

_TOOL_LIMIT_S = 30
_TOOLS = {
    "npu": ("npu-smi", "info"),
    "cuda": ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"),
}


@dataclass(frozen=True)
class Facts:
    """A machine as a new process sees it.

    kind: the device the checks are about: npu, cuda or cpu. host: its memory, as of one more card. shared_memory: bytes
    of /dev/shm, None where there is none. cores: how many this process may use. tool: the vendor's command that lists
    processes; processes: what it printed, None when it is not here. timeout_s: of the process group.
    """

    kind: str
    env: Mapping[str, str] = field(default_factory=dict)
    packages: Packages = field(default_factory=Packages)
    probe: Probe = field(default_factory=Probe)
    host: Card = field(default_factory=lambda: Card("host", 0, 0))
    machine: str = ""
    python: str = ""
    shared_memory: int | None = None
    cores: int = 1
    tool: str = ""
    processes: str | None = None
    timeout_s: int = 1800

    @property
    def ranks(self) -> int:
        """One for each device."""
        return max(1, len(self.probe.cards))


def gather(device: Device) -> Facts:
    """Look at this machine. Takes as long as importing torch."""
    packages = read_packages()
    probe = run_probe(device)
    kind = kind_of(device, packages, probe, Path("/dev"))
    memory = psutil.virtual_memory()
    tool = _TOOLS.get(kind, ("",))
    return Facts(
        kind=kind,
        env=dict(os.environ),
        packages=packages,
        probe=probe,
        host=Card("host", int(memory.available), int(memory.total)),
        machine=platform.machine(),
        python=platform.python_version(),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        cores=usable_cores(),
        tool=tool[0],
        processes=_ask(tool) if tool[0] else None,
        timeout_s=LaunchConfig().timeout_s,
    )


def kind_of(device: Device, packages: Packages, probe: Probe, dev: Path) -> str:
    """The device the checks are about: with auto what works, or what the machine has (in /dev) or was set up for."""
    if device is not Device.auto:
        return device.name
    if probe.device_type in ("cuda", "npu"):
        return probe.device_type
    if packages.torch_npu is not None or any(dev.glob("davinci[0-9]*")):
        return "npu"
    return "cuda" if any(dev.glob("nvidia[0-9]*")) else "cpu"


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, and a container's quota in `cgroup` (microseconds of a period)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, *period = cgroup.read_text(encoding="utf-8").split() if cgroup.is_file() else ["max"]
    return allowed if quota == "max" else min(allowed, max(1, int(quota) // int(period[0])))


def _ask(words: tuple[str, ...]) -> str | None:
    """What a command prints; None when it is not here, does not answer or fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
