"""The plan that train says at its start and holds against its first steps, the planning process played."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lctrain.train.callbacks.base import StepRecord
from lctrain.train.callbacks.planned import Planned
from lctrain.train.checkpoint import TrainState

GIB = 2**30
PLAN = {"line": "plan: 3 GiB of 8", "tensor_bytes": 3 * GIB, "reserve_bytes": GIB, "whole_process": False}


class Played:
    """Stands in for subprocess.Popen: ends when it is told to."""

    def __init__(self, words: list[str], **given: Any) -> None:
        self.words, self.given = words, given
        self.stdout: io.StringIO | None = io.StringIO()
        self.returncode: int | None = None
        self.killed = self.waited = False

    def ends(self, said: str, code: int = 0) -> None:
        """Says something and is gone."""
        self.stdout = io.StringIO(said)
        self.returncode = code

    def poll(self) -> int | None:
        """None while it plans."""
        return self.returncode

    def kill(self) -> None:
        """As Popen."""
        self.killed = True
        self.returncode = -9

    def wait(self) -> int | None:
        """As Popen."""
        self.waited = True
        return self.returncode


def mesh(device_type: str = "npu", *, ranks: int = 8) -> Any:
    """What is asked of a mesh: how many ranks, and the device's name and 64 GiB."""
    device = SimpleNamespace(type=device_type, name="Ascend910B3", total_memory_bytes=lambda: 64 * GIB)
    return SimpleNamespace(sizes=SimpleNamespace(world=ranks), device=device)


class Run:
    """A run that has started to plan."""

    def __init__(self, callback: Planned, process: Played, said: list[str]) -> None:
        self.callback, self.process, self.said = callback, process, said

    def step(self, peak: int = 4 * GIB) -> None:
        """A step ends."""
        self.callback.step_end(record(peak))


def record(peak: int) -> StepRecord:
    """A step's record, of which only the peak is asked."""
    return StepRecord(
        step=1,
        epoch=0.0,
        loss=0.0,
        own_loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        unit="tokens",
        units=0.0,
        step_time_s=0.0,
        units_per_s=0.0,
        mfu=None,
        peak_memory_bytes=peak,
        data_wait_s=0.0,
        skipped=False,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Planning has begun, on 8 ranks, inside a launcher's environment."""
    started: list[Played] = []

    def popen(words: list[str], **given: Any) -> Played:
        started.append(Played(words, **given))
        return started[-1]

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LCTRAIN_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    monkeypatch.setattr(subprocess, "Popen", popen)
    said: list[str] = []
    callback = Planned(tmp_path / "config.yaml", mesh=mesh(), ranks_here=4, report=said.append)
    callback.start(TrainState(), 10)
    assert len(started) == 1
    return Run(callback, started[0], said)


def test_it_plans_the_runs_own_config_on_all_its_ranks_out_of_the_launchers_sight(run: Run, tmp_path: Path) -> None:
    module = [sys.executable, "-m", "lctrain.plan.at_start"]
    assert run.process.words == [*module, str(tmp_path / "config.yaml"), "8", "npu", "Ascend910B3", str(64 * GIB)]
    environment = run.process.given["env"]
    assert environment["SOMETHING_ELSE"] == "stays"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LCTRAIN_STORE"} & set(environment)
    assert run.process.given["stdout"] == subprocess.PIPE
    # It opens no device, which would take of the run's memory.
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["ASCEND_RT_VISIBLE_DEVICES"] == ""


def test_ranks_of_a_machine_share_its_memory_where_that_is_the_device(tmp_path: Path) -> None:
    """Four of eight ranks are here: an accelerator is a rank's own, the host's memory is a quarter's."""
    played: list[list[str]] = []

    def popen(words: list[str], **given: Any) -> Played:
        played.append(words)
        return Played(words, **given)

    for device_type in ("cpu", "cuda"):
        callback = Planned(tmp_path / "config.yaml", mesh=mesh(device_type), ranks_here=4, report=print)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", popen)
            callback.start(TrainState(), 10)
    assert [words[-1] for words in played] == [str(16 * GIB), str(64 * GIB)]


def test_the_plan_is_said_once_when_it_is_there_and_compared_once(run: Run) -> None:
    run.step()
    run.step()
    assert run.said == []  # still planning
    run.process.ends(json.dumps(PLAN))
    run.step()
    assert run.said == [
        "plan: 3 GiB of 8",
        "plan: predicted peak 3.00 GiB (tensors), measured 4.00 GiB (0.75)",
    ]
    run.step()
    run.step()
    assert len(run.said) == 2


def test_a_plan_that_is_ready_at_once_waits_for_steps_that_are_settled(run: Run) -> None:
    run.process.ends(json.dumps(PLAN))
    run.step(peak=GIB)  # the first step allocates optimizer state
    assert run.said == ["plan: 3 GiB of 8"]
    run.step(peak=6 * GIB)
    assert run.said[1:] == ["plan: predicted peak 3.00 GiB (tensors), measured 6.00 GiB (0.50)"]


def test_where_only_the_whole_process_is_known_the_reserve_counts(run: Run) -> None:
    run.process.ends(json.dumps(PLAN | {"whole_process": True}))
    run.step()
    run.step()
    assert run.said[1] == ("plan: predicted peak 4.00 GiB (tensors and the process itself), measured 4.00 GiB (1.00)")


def test_a_plan_that_cannot_be_says_why_and_is_not_compared(run: Run) -> None:
    run.process.ends(json.dumps({"line": "plan: none (no such device)"}))
    run.step()
    run.step()
    run.step()
    assert run.said == ["plan: none (no such device)"]


@pytest.mark.parametrize("text", ["", "Killed\n", '{"line": '])
def test_planning_that_breaks_is_one_line_and_no_error(run: Run, text: str) -> None:
    run.process.ends(text, code=1)
    run.step()
    run.step()
    assert run.said == ["plan: none (planning ended with code 1)"]


@pytest.mark.parametrize("status", ["completed", "preempted", "failed"])
def test_an_unfinished_plan_ends_with_the_run(run: Run, status: str) -> None:
    run.step()
    run.callback.close(status)
    assert run.process.killed
    assert run.process.waited
    assert run.said == []


def test_a_finished_plan_needs_no_end(run: Run) -> None:
    run.process.ends(json.dumps(PLAN))
    run.step()
    run.callback.close("completed")
    assert not run.process.killed


def test_a_run_that_fails_before_it_starts_has_nothing_to_end(tmp_path: Path) -> None:
    Planned(tmp_path / "config.yaml", mesh=mesh(), ranks_here=8, report=print).close("failed")
