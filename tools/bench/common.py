"""What every benchmark here shares: sides that take turns, peak memory, and the JSON line at the end.

A side is a process of its own (`python SCRIPT --side NAME`), started with a fixed number of threads. Two
sides never compute at the same time: each runs a block of steps when it is told to, so that whatever else
the machine does falls on both alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

_GO, _STOP = "go", "stop"


def fixed_threads(threads: int) -> dict[str, str]:
    """This process's environment with `threads` for every library, and no network."""
    count = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **dict.fromkeys(names, count), **offline}


class Side:
    """One side of a comparison, alive until `stop`."""

    def __init__(self, script: str, name: str, *arguments: str, threads: int = 1) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, script, "--side", name, *arguments],
            env=fixed_threads(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def block(self) -> list[float]:
        """Let the side run its next block; seconds of each step."""
        self._say(_GO)
        return self.answer()

    def answer(self) -> Any:
        """The next JSON the side gives; other lines are passed on. Raises RuntimeError when it ended instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            print(f"[{self.name}] {line}", end="", file=sys.stderr)
        raise RuntimeError(f"the {self.name} side ended with exit code {self._process.wait()}")

    def stop(self) -> None:
        """Tell the side to end, and wait."""
        self._say(_STOP)
        self._process.wait()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)


_MARK = "\x1f"


def give(value: Any) -> None:
    """What a side hands to the process that started it, also while its own printing goes elsewhere."""
    print(f"{_MARK}{json.dumps(value)}", flush=True, file=sys.__stdout__)


class Pacer:
    """In a side: call it at the end of every step. Times steps, and waits for its turn after each block."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seconds: list[float] = []
        self._await()

    def __call__(self) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        if len(self._seconds) == self._steps:
            give(self._seconds)
            self._seconds = []
            self._await()
        else:
            self._since = now

    def _await(self) -> None:
        if sys.stdin.readline().strip() != _GO:
            sys.stdout.flush()
            # The loops around us have no other way to end in the middle.
            os._exit(0)
        self._since = time.perf_counter()


def take_turns(sides: Sequence[Side], rounds: int) -> dict[str, list[list[float]]]:
    """Blocks of each side, by name. Every side first runs one block that is thrown away (warming up)."""
    for side in sides:
        side.block()
    blocks: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in range(rounds):
        # Every other round runs backwards, so that no side is always the one after a pause.
        for side in sides if number % 2 == 0 else reversed(sides):
            blocks[side.name].append(side.block())
    for side in sides:
        side.stop()
    return blocks


def typical(blocks: Sequence[Sequence[float]]) -> float:
    """Median over all steps."""
    return median(seconds for block in blocks for seconds in block)


def paired_ratio(ours: Sequence[Sequence[float]], peer: Sequence[Sequence[float]]) -> float:
    """Median over rounds of (our median step / the peer's in the same round): drifting load cancels."""
    return median(median(a) / median(b) for a, b in zip(ours, peer, strict=True))


def resident_bytes() -> int:
    """Resident set of this process now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Largest resident set since the process began, or since `forget_peak` (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Let the peak begin again at what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def finish(
    name: str, *, ours: float, peer: float, ratio: float, target: float, ok: bool, **more: Any
) -> None:
    """Print the result as the last line, and exit 0 when it is met, else 1."""
    line = {"name": name, "ours": ours, "peer": peer, "ratio": ratio, "target": target, "ok": ok, **more}
    print(json.dumps(_rounded(line)), flush=True)
    sys.exit(0 if ok else 1)


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
