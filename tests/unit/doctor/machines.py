"""Made-up machines: what the doctor would have gathered there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, Level
from lctrain.doctor.probe import Card, Probe
from lctrain.doctor.report import examine
from lctrain.runtime.ascend import Packages

GIB = 2**30
CARD = Card("Ascend910B3", 63 * GIB, 64 * GIB)

NPU = Facts(
    kind="npu",
    env={"ASCEND_HOME_PATH": "/"},
    packages=Packages("2.13.0+cpu", "2.13.0", "2.13.0"),
    probe=Probe(stage="done", device_type="npu", cards=(CARD, CARD)),
    host=Card("host", 100 * GIB, 128 * GIB),
    machine="aarch64",
    python="3.11.7",
    shared_memory=16 * GIB,
    cores=8,
    tool="npu-smi",
    processes="",
)
CUDA = replace(
    NPU,
    kind="cuda",
    env={},
    packages=Packages("2.13.0", cuda="13.0"),
    probe=Probe(stage="done", device_type="cuda", cards=(Card("NVIDIA H100 80GB HBM3", 79 * GIB, 80 * GIB),)),
    tool="nvidia-smi",
)
CPU = replace(CUDA, kind="cpu", packages=Packages("2.13.0+cpu"), probe=Probe(stage="done", device_type="cpu"), tool="")


def found(machine: Facts, check: str) -> Finding | None:
    """What one check says, by its name in the report."""
    return {finding.check: finding for finding in examine(machine)}.get(check)


def faults(machine: Facts) -> list[str]:
    """Names of the checks that found a fault."""
    return [finding.check for finding in examine(machine) if finding.level is Level.fault]


def with_env(machine: Facts, env: Mapping[str, str]) -> Facts:
    """The machine with more variables."""
    return replace(machine, env={**machine.env, **env})


def with_probe(machine: Facts, **fields: Any) -> Facts:
    """The machine with another answer to the probe."""
    return replace(machine, probe=replace(machine.probe, **fields))
