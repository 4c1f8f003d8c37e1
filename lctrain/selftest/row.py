"""One line of a selftest, and what ranks' lines come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


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


def farthest(errors: Mapping[str, float]) -> tuple[str, float]:
    """(name, error) of the largest. What is no number is infinitely far: `max` would pass over it."""
    sound = {name: _sound(error) for name, error in errors.items()}
    name = max(sound, key=lambda n: sound[n])
    return name, sound[name]


def of_all_ranks(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """The first rank's rows, each with the largest error that any rank found; then what only others saw fail."""
    rows = {(row.section, row.name): row for row in ranks[0]}
    for rank, found in enumerate(ranks[1:], 1):
        for row in found:
            key = (row.section, row.name)
            known = rows.get(key)
            if not row.ok if known is None else _sound(row.error) > _sound(known.error):
                rows[key] = replace(row, detail=f"rank {rank}: {row.detail}")
    return list(rows.values())


def _sound(error: float) -> float:
    return math.inf if math.isnan(error) else error
