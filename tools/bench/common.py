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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Protocol

_GO, _STOP = "go", "stop"
_MARK = "\x1f"


class Watch(Protocol):
    """What a side's training loop calls."""

    def begin(self) -> None:
        """Before the first step."""

    def step_end(self) -> None:
        """After every step."""


def fixed_threads(threads: int) -> dict[str, str]:
    """This process's environment with `threads` for every library, and no network."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(names, str(threads)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Side:
    """One side of a comparison, alive until `stop`. What it prints goes to standard error.

    python: the interpreter of a peer that has its own environment. arguments: more of its command line.
    """

    def __init__(
        self,
        script: str,
        name: str,
        *,
        threads: int = 1,
        python: str = sys.executable,
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, script, "--side", name, *arguments],
            env=fixed_threads(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def block(self) -> list[float]:
        """Let the side run its next block of steps; the seconds of each."""
        self._say(_GO)
        return list(self.answer())

    def answer(self) -> Any:
        """The next value the side gives. Raises RuntimeError when it ended instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            print(f"[{self.name}] {line}", end="", file=sys.stderr)
        raise RuntimeError(f"the {self.name} side ended with exit code {self._process.wait()}")

    def stop(self) -> None:
        """Tell the side to end, and wait."""
        self._say(_STOP)
        self._process.communicate()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)


def give(value: Any) -> None:
    """In a side: hand a value to the process that started it."""
    print(f"{_MARK}{json.dumps(value)}", flush=True)


def end_side() -> NoReturn:
    """In a side: leave a training loop that has no other way to end in the middle."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_for_turn() -> None:
    """In a side: return when it is told to run its next block; leave when it is told to stop."""
    if sys.stdin.readline().strip() != _GO:
        end_side()


class Turns:
    """In a side: the Watch that times steps, and waits to be told before each block of them."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seconds: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        """Wait for the first block."""
        wait_for_turn()
        self._since = time.perf_counter()

    def step_end(self) -> None:
        """Take the time; at the end of a block give the times and wait."""
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        self._since = now
        if len(self._seconds) == self._steps:
            give(self._seconds)
            self._seconds = []
            self.begin()


class Peak:
    """In a side: the Watch that gives the bytes resident at most during `steps` steps, beyond those before them."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._before = 0

    def begin(self) -> None:
        """Let the peak begin again at what is resident now (proc(5), clear_refs)."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def step_end(self) -> None:
        """After the last step, give the peak and end."""
        self._left -= 1
        if not self._left:
            give(_status("VmHWM") - self._before)
            end_side()


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def take_turns(sides: Sequence[Side], rounds: int) -> dict[str, list[list[float]]]:
    """Blocks of each side, by name. Every side first runs one block that is thrown away (warming up)."""
    for side in sides:
        side.block()
    blocks: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in range(rounds):
        # Every other round runs backwards, so that no side always follows the same other.
        for side in sides if number % 2 == 0 else reversed(sides):
            blocks[side.name].append(side.block())
    for side in sides:
        side.stop()
    return blocks


def typical(blocks: Sequence[Sequence[float]]) -> float:
    """Median over all steps."""
    return median(value for block in blocks for value in block)


def paired_ratio(ours: Sequence[Sequence[float]], peer: Sequence[Sequence[float]]) -> float:
    """Median over rounds of (our median / the peer's median in the same round): drifting load cancels."""
    return median(median(a) / median(b) for a, b in zip(ours, peer, strict=True))


def wall_seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


def finish(result: Mapping[str, Any]) -> NoReturn:
    """Print name, ours, peer, ratio, target, ok and whatever else as the last line; exit 0 when ok, else 1."""
    missing = {"name", "ours", "peer", "ratio", "target", "ok"} - set(result)
    assert not missing, missing
    print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in result.items()}), flush=True)
    sys.exit(0 if result["ok"] else 1)
