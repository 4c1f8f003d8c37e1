"""One line of a selftest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A comparison or a figure. error must not pass tolerance; without a tolerance it is a figure, or a reason."""

    section: str
    name: str
    detail: str
    error: float = 0.0
    tolerance: float | None = None

    @property
    def ok(self) -> bool:
        """An error that is not a number is never within tolerance."""
        return self.tolerance is None or self.error <= self.tolerance

    def line(self) -> str:
        """For a table of Markdown."""
        if self.tolerance is None:
            return f"| {self.name} | | {self.detail} |"
        verdict = "ok" if self.ok else "**DIFFERS**"
        return f"| {self.name} | {verdict} | {self.error:.2g}, at most {self.tolerance:.2g}; {self.detail} |"


def compared(section: str, name: str, measure: Callable[[], tuple[float, str]], tolerance: float) -> Row:
    """The row of what `measure` gives: (error, detail). A device's failure is what a selftest is there to report."""
    try:
        error, detail = measure()
    except RuntimeError as failure:
        error, detail = math.inf, str(failure).strip().partition("\n")[0]
    return Row(section, name, detail, error, tolerance)
