"""All checks, in the order in which to mend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lctrain.doctor import devices, host, packages, settings
from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, Level

CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    packages.torch,
    packages.torch_npu,
    packages.build,
    packages.cann,
    packages.transfer,
    devices.cards,
    devices.bf16,
    devices.processes,
    settings.allocator,
    settings.connecting,
    settings.executing,
    settings.rank_table,
    host.shared_memory,
    host.affinity,
)


def examine(facts: Facts) -> list[Finding]:
    """What the checks that concern this kind of device found."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


def has_fault(findings: Sequence[Finding]) -> bool:
    """Whether training cannot work."""
    return any(finding.level is Level.fault for finding in findings)


def lines(kind: str, findings: Sequence[Finding]) -> list[str]:
    """The report: a line a finding, and the count."""
    faults, warnings = (sum(f.level is level for f in findings) for level in (Level.fault, Level.warning))
    return [
        f"doctor: device={kind}",
        *(finding.line() for finding in findings),
        f"doctor: {faults} fault{'' if faults == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}",
    ]
