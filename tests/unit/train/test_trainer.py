"""The loop with parts that are not a model: when it saves, evaluates, stops and gives up."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lctrain.config.resolve import Sizes
from lctrain.engines.base import StepResult
from lctrain.errors import TrainingStopped
from lctrain.objectives.base import Work
from lctrain.runtime.device import Accelerator
from lctrain.train.checkpoint import TrainState
from lctrain.train.stop import StopFlag
from lctrain.train.trainer import Limits, Trainer


class Engine:
    """Skips the steps it is told to."""

    def __init__(self, skips: set[int]) -> None:
        self.skips, self.steps, self.lrs = skips, 0, []
        self.model, self.losses = None, []

    def microstep(self, *, last: bool) -> Any:
        return nullcontext()

    def scale_state(self) -> dict[str, float]:
        return {"value": 64.0}

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def step(self, lr: float) -> StepResult:
        self.steps += 1
        self.lrs.append(lr)
        skipped = self.steps - 1 in self.skips
        return StepResult(math.nan if skipped else 1.0, skipped)


class Objective:
    """A batch is a (loss sum, count) pair."""

    unit = "samples"

    def work(self, batch: tuple[float, int]) -> Work:
        return Work(count=batch[1], units=2 * batch[1], flops=0.0)

    def shard(self, batch: Any) -> Any:
        return batch

    def loss_sum(self, model: None, batch: tuple[float, int]) -> torch.Tensor:
        return torch.tensor(batch[0])


class Batches:
    """Two unequal micro-batches a step."""

    def iterate(self, start_step: int, end_step: int) -> Iterator[tuple[int, list[tuple[float, int]]]]:
        for step in range(start_step, end_step):
            yield step, [(3.0 * step, 1), (5.0, 3)]


class Recorder:
    """Every hook that was called, with the step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args))

    def of(self, name: str) -> list[Any]:
        return [args[0] for hook, args in self.calls if hook == name]


def single_mesh() -> Any:
    """What the trainer needs of a mesh of one rank."""
    return SimpleNamespace(
        sum_over_data=lambda values, flag: (list(values), flag),
        sum_losses=lambda value: value,
        device=Accelerator("cpu", 0),
        sizes=Sizes(1, 1, 1),
        data_rank=0,
        cp_rank=0,
        sp_rank=0,
        tp_rank=0,
    )


def trainer(total: int = 6, skips: set[int] = frozenset(), **fields: Any) -> tuple[Trainer, Recorder, list[int]]:
    """(trainer, what it told callbacks, the steps it saved)."""
    recorder, saved = Recorder(), []
    defaults: dict[str, Any] = {
        "engine": Engine(skips),
        "objective": Objective(),
        "batches": Batches(),
        "mesh": single_mesh(),
        "limits": Limits(total, 3, 4.0),
        "lr_at": lambda step: 0.1 * step,
        "save": lambda state: saved.append(state.step),
        "evaluate": lambda: {"eval_loss": 1.0},
        "stop": StopFlag(),
        "seed": 0,
        "callbacks": [recorder],
    }
    return Trainer(**{**defaults, **fields}), recorder, saved


def test_the_loss_is_the_sum_over_the_global_batch_divided_once() -> None:
    subject, recorder, _ = trainer(total=2)
    assert subject.fit() == "completed"
    assert [r.loss for r in recorder.of("step_end")] == [5 / 4, 8 / 4]
    assert subject.engine.losses == [0.0, 5 / 4, 3 / 4, 5 / 4]
    assert subject.engine.lrs == [0.0, 0.1]
    assert [(r.step, r.units, r.epoch) for r in recorder.of("step_end")] == [(1, 8.0, 0.25), (2, 16.0, 0.5)]
    assert (subject.state.first_loss, subject.state.last_loss) == (5 / 4, 2.0)
    assert subject.state.loss_scale == {"value": 64.0}


@pytest.mark.parametrize(
    ("fields", "saves", "evaluations"),
    [
        ({}, [6], [6]),
        ({"save_steps": 2}, [2, 4, 6], [6]),
        ({"save_steps": 4}, [4, 6], [6]),
        ({"save_steps": 4, "save_at_end": False}, [4], [6]),
        ({"save_at_end": False}, [], [6]),
        ({"eval_due": lambda step: step % 3 == 0}, [6], [3, 6]),
        ({"eval_due": lambda step: step % 4 == 0}, [6], [4, 6]),
        ({"evaluate": None, "eval_due": lambda step: step % 4 == 0}, [6], []),
        ({"state": TrainState(step=4)}, [6], [6]),
        ({"state": TrainState(step=6)}, [], [6]),
    ],
)
def test_when_it_saves_and_evaluates(fields: dict[str, Any], saves: list[int], evaluations: list[int]) -> None:
    subject, recorder, saved = trainer(**fields)
    assert subject.fit() == "completed"
    assert saved == saves == recorder.of("saved")
    assert recorder.of("evaluated") == evaluations
    assert subject.state.step == 6


def test_skipped_steps_in_a_row_end_the_run_and_name_the_mend() -> None:
    subject, recorder, saved = trainer(skips={2, 3, 4})
    with pytest.raises(TrainingStopped) as caught:
        subject.fit()
    text = str(caught.value)
    assert "3 steps in a row up to step 5" in text
    for mend in ("Lower optim.lr", "check the data", "checkpoint.resume=auto"):
        assert mend in text
    assert saved == []  # the last good checkpoint is not written over
    assert [r.skipped for r in recorder.of("step_end")] == [False, False, True, True]


def test_skipped_steps_that_are_not_in_a_row_do_not() -> None:
    subject, recorder, _ = trainer(total=8, skips={0, 1, 3, 4, 6, 7})
    assert subject.fit() == "completed"
    assert sum(r.skipped for r in recorder.of("step_end")) == 6


def test_skips_are_counted_across_a_resume() -> None:
    subject, _, _ = trainer(skips={0}, state=TrainState(step=1, skipped=2))
    with pytest.raises(TrainingStopped):
        subject.fit()


def test_a_stop_request_finishes_the_step_saves_and_says_preempted() -> None:
    stop = StopFlag()
    saved: list[int] = []

    def lr(step: int) -> float:
        stop.requested = step == 2  # a signal that comes in the middle of the third step
        return 0.1

    subject, recorder, _ = trainer(stop=stop, lr_at=lr, save=lambda state: saved.append(state.step), save_at_end=False)
    assert subject.fit() == "preempted"
    assert saved == [3]
    assert recorder.of("evaluated") == []
    assert subject.engine.steps == 3


def test_a_stop_right_after_a_save_does_not_save_again() -> None:
    stop = StopFlag()
    saved: list[int] = []

    def save(state: TrainState) -> None:
        saved.append(state.step)
        stop.requested = True

    subject, _, _ = trainer(stop=stop, save=save, save_steps=2)
    assert subject.fit() == "preempted"
    assert saved == [2]


def test_the_first_step_is_checked_once() -> None:
    checks: list[int] = []
    subject, recorder, _ = trainer(state=TrainState(step=2), first_step_done=lambda: checks.append(1))
    subject.fit()
    assert len(checks) == 1
    assert subject.throughput > 0
    assert recorder.calls[0][0] == "start"


def test_a_batch_in_which_nothing_counts_is_not_divided_by_zero() -> None:
    class Empty(Batches):
        def iterate(self, start_step: int, end_step: int) -> Iterator[Any]:
            yield 0, [(0.0, 0)]

    subject, recorder, _ = trainer(total=1, batches=Empty())
    assert subject.fit() == "completed"
    assert recorder.of("step_end")[0].loss == 0.0


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, given back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_raise_the_flag_and_a_second_ctrl_c_leaves(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    flag = StopFlag()
    flag.install()
    assert not flag.requested
    os.kill(os.getpid(), number)
    assert flag.requested
    assert left == []
    os.kill(os.getpid(), number)
    assert left == ([130] if number == signal.SIGINT else [])


@pytest.mark.usefixtures("handlers")
def test_a_forked_helper_dies_when_it_is_told_to() -> None:
    """Data preparation forks a pool, which ends its processes by SIGTERM and waits for them without limit."""
    StopFlag().install()
    for number in (signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if child == 0:  # a handler of Python's could be tripped just before the process blocks, and then never run
            os._exit(0 if signal.getsignal(number) is signal.SIG_DFL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
