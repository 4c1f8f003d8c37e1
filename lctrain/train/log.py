"""What the main rank says: on the terminal, and in log.txt once there is a run directory."""

from __future__ import annotations

from pathlib import Path


class Log:
    """Call it with a line. Other ranks' lines go nowhere."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._path: Path | None = None
        self._early: list[str] = []

    def __call__(self, line: str) -> None:
        """Print `line` and keep it."""
        if not self._speaks:
            return
        print(line, flush=True)
        if self._path is None:
            self._early.append(line)
        else:
            self._append([line])

    def attach(self, path: Path) -> None:
        """Write to `path` from now on, beginning with what was said before."""
        if self._speaks:
            self._path = path
            self._append(self._early)
            self._early = []

    def _append(self, lines: list[str]) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
