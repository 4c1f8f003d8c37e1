"""Steps under the profiler: which, and what their file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lctrain.runtime.device import Accelerator
from lctrain.train.callbacks.base import StepRecord
from lctrain.train.callbacks.profiler import Profiler
from lctrain.train.checkpoint import TrainState


def record(step: int) -> StepRecord:
    """A step."""
    return StepRecord(step, 0.1, 1.0, 1.0, 1.0, 0.1, "tokens", 64.0, 0.5, 128.0, None, 7, 0.0, False)


def products(folder: Path) -> list[int]:
    """Widths of the products of matrices in the trace; step n multiplies by n columns."""
    trace = json.loads((folder / "rank-3.json").read_text())
    return [e["args"]["Input Dims"][1][1] for e in trace["traceEvents"] if e.get("name") == "aten::mm"]


def run(folder: Path, steps: int, *, first: int, last: int, total: int) -> list[str]:
    """What a run of steps first to last says, of which `steps` are traced."""
    said: list[str] = []
    profiler = Profiler(folder, device=Accelerator("cpu", 0), rank=3, steps=steps, report=said.append)
    profiler.start(TrainState(step=first - 1), total)
    for step in range(first, last + 1):
        torch.ones(2, 2) @ torch.ones(2, step)
        profiler.step_end(record(step))
    profiler.close("completed")
    return said


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trace say which step multiplied."""
    plain = torch.profiler.profile
    monkeypatch.setattr(torch.profiler, "profile", lambda **how: plain(record_shapes=True, **how))


def test_steps_after_the_first_two_are_traced(tmp_path: Path) -> None:
    assert run(tmp_path, 2, first=1, last=6, total=6) == [f"profile: steps 3 to 4 of every rank in {tmp_path}"]
    assert products(tmp_path) == [3, 4]


def test_a_continued_run_counts_from_its_own_first(tmp_path: Path) -> None:
    run(tmp_path, 1, first=11, last=14, total=20)
    assert products(tmp_path) == [13]


def test_a_short_run_is_traced_all_the_same(tmp_path: Path) -> None:
    run(tmp_path, 2, first=1, last=2, total=2)
    assert products(tmp_path) == [1, 2]


def test_a_run_that_ends_early_keeps_what_it_has(tmp_path: Path) -> None:
    assert run(tmp_path, 5, first=1, last=4, total=9) == []
    assert products(tmp_path) == [3, 4]
