"""The real command line in processes of its own, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # against hangs; a run takes seconds


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what a launcher would have set, finding the checkout from any folder."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(
            ("ACCELERATE_", "LCTRAIN_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "MA_", "VC_")
        )
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def lctrain(*words: str, cwd: Path, module: Sequence[str] = ("lctrain",)) -> subprocess.CompletedProcess[str]:
    """Run `python -m lctrain WORDS` to its end. module: another module and what stands before the words."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module, *unplanned(words)],
        cwd=cwd,
        env=environment(HF_HOME=str(cwd / "hf")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        raise AssertionError(f"{words} did not end in {LIMIT_S} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def unplanned(words: Sequence[str]) -> list[str]:
    """The words of a run, without the plan at its start unless they ask for it: it would cost a core for seconds."""
    trains = any(w.startswith("recipe=") for w in words) and not any(w.startswith("plan.") for w in words)
    return [*words, "plan.at_start=false"] if trains else list(words)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a command with the ranks that any launcher started for it."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    process.kill()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class Running:
    """A command that still runs; its output goes to files, so that it never waits for a reader."""

    def __init__(self, *words: str, cwd: Path, name: str = "command", env: Mapping[str, str] | None = None) -> None:
        self._out, self._err = (cwd / f"{name}.{kind}" for kind in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lctrain", *unplanned(words)],
                cwd=cwd,
                env=environment(**env or {}),
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        """What it printed so far."""
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """What it printed to stderr so far."""
        return self._err.read_text(encoding="utf-8")

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something the command does; fails when it ends first."""
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"nothing happened in {LIMIT_S} s\n{self.out}\n{self.err}")
            try:
                self.process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended early with {self.process.returncode}\n{self.out}\n{self.err}")

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks by number."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {int(c.environ()["RANK"]): c for c in children if "lctrain.worker" in c.cmdline()}

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end in {limit_s} s\n{self.out}\n{self.err}") from None

    def kill(self) -> None:
        """End it with all its ranks."""
        end(self.process)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Training records of metrics.jsonl, whole lines only."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def column(run_dir: Path, name: str) -> list[Any]:
    """One field of all records."""
    return [row[name] for row in records(run_dir)]


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.json."""
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
