"""How far a copy is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

EVERY_S = 10.0


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


class Progress:
    """Bytes done of `total`. begun: done before. report: takes lines where stderr is no terminal."""

    def __init__(self, title: str, *, total: int, begun: int, report: Callable[[str], None]) -> None:
        self._title, self._total, self._begun, self._report = title, total, begun, report
        self._start = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(f"stage {self._title}", total=self._total, completed=self._begun)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, read: int) -> None:
        """`read` bytes were read since the start."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun + read)
            return
        now = time.monotonic()
        if now - self._said < EVERY_S or not read:
            return
        self._said = now
        done, speed = self._begun + read, read / (now - self._start)
        left = max(self._total - done, 0) / speed
        self._report(
            f"stage: {self._title}: {size_text(done)} of {size_text(self._total)}, {size_text(speed)}/s, "
            f"{left:,.0f} s left"
        )
