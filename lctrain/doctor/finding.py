"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """fault: training cannot work so. warning: it may be slow, or fail later."""

    ok = "ok"
    warning = "warning"
    fault = "fault"


@dataclass(frozen=True)
class Finding:
    """check: a short name. text: what was seen. mend: what to do about it; empty when all is well."""

    level: Level
    check: str
    text: str
    mend: str = ""

    def line(self) -> str:
        """One line of the report."""
        return f"{self.level.value:<8} {self.check:<12} {self.text}" + (f"; {self.mend}" if self.mend else "")


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(Level.ok, check, text)


def warning(check: str, text: str, mend: str) -> Finding:
    """Training may be slow, or fail later."""
    return Finding(Level.warning, check, text, mend)


def fault(check: str, text: str, mend: str) -> Finding:
    """Training cannot work so."""
    return Finding(Level.fault, check, text, mend)
