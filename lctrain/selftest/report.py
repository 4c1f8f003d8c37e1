"""The report of a selftest: one Markdown file, to be attached to an issue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lctrain.selftest.row import Row

TITLE = "lctrain selftest"


def markdown(results: dict[str, Any], rows: Sequence[Row], doctor: Sequence[str]) -> str:
    """What ran where, a table for each section, and what doctor says of the machine."""
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    parts = [
        f"# {TITLE}",
        "",
        f"{verdict(rows)} {results['ranks']} x {results['device']} ({results['memory_bytes'] / 2**30:.1f} GiB each); "
        f"{results['seconds']:.0f} s; {versions}.",
    ]
    for section, found in groupby(rows, key=lambda row: row.section):
        parts += ["", f"## {section}", "", "| | | |", "|---|---|---|", *(row.line() for row in found)]
    return "\n".join([*parts, "", "## doctor", "", "```", *doctor, "```", ""])


def verdict(rows: Sequence[Row]) -> str:
    """One sentence."""
    compared = [row for row in rows if row.tolerance is not None]
    wrong = [row for row in compared if not row.ok]
    if not wrong:
        return f"All {len(compared)} comparisons hold."
    names = "; ".join(f"{row.section}: {row.name}" for row in wrong)
    return f"{len(wrong)} of {len(compared)} comparisons differ: {names}."
