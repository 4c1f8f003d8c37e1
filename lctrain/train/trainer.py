"""The loop. It knows no model, no layout and no file: those come in as parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lctrain.engines.base import Engine
from lctrain.errors import TrainingStopped
from lctrain.objectives.base import Objective
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.seed import derive
from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState
from lctrain.train.step import forward_backward
from lctrain.train.stop import StopFlag


class Batches(Protocol):
    """Micro-batches of each step for this data rank."""

    def iterate(self, start_step: int, end_step: int) -> Iterator[tuple[int, Sequence[Any]]]:
        """(step, micro-batches) from start_step up to, not including, end_step."""


@dataclass(frozen=True)
class Limits:
    """total_steps: where training ends. max_skipped_steps: non-finite steps in a row that end the run."""

    total_steps: int
    max_skipped_steps: int
    steps_per_epoch: float


@dataclass
class Trainer:
    """Runs steps until the end or a stop request, calling callbacks and saving.

    lr_at: learning rate of a step. save: writes a checkpoint of the state (a collective).
    evaluate: metrics on held-out data (a collective), or None; eval_due: whether to after so many steps, besides at
    the end. save_steps: 0 is off. first_step_done: a check to run once, after this process's first step. step_done:
    called with the number of steps after each. throughput: units a second over the steps after the first.
    """

    engine: Engine
    objective: Objective
    batches: Batches
    mesh: Mesh
    limits: Limits
    lr_at: Callable[[int], float]
    save: Callable[[TrainState], None]
    evaluate: Callable[[], dict[str, float]] | None
    stop: StopFlag
    seed: int
    save_steps: int = 0
    eval_due: Callable[[int], bool] = lambda step: False
    save_at_end: bool = True
    callbacks: Iterable[Callback] = ()
    state: TrainState = field(default_factory=TrainState)
    first_step_done: Callable[[], None] | None = None
    step_done: Callable[[int], None] | None = None
    throughput: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> str:
        """Train. Returns completed, or preempted after saving.

        Raises TrainingStopped when too many steps in a row are not finite.
        """
        self._call("start", self.state, self.limits.total_steps)
        first = saved_at = self.state.step
        seconds = units = 0.0
        waiting_since = time.perf_counter()
        for step, micro in self.batches.iterate(self.state.step, self.limits.total_steps):
            waited = time.perf_counter() - waiting_since
            record = self._step(step, micro, waited)
            if record is None:
                break
            self._call("step_end", record)
            if step == first and self.first_step_done is not None:
                self.first_step_done()
            if step > first or self.limits.total_steps == first + 1:  # the first step also pays for warming up
                seconds, units = seconds + record.step_time_s, units + record.units_per_s * record.step_time_s
                self.throughput = units / seconds
            if self.eval_due(self.state.step):
                self._evaluate()
            if self.save_steps and self.state.step % self.save_steps == 0:
                self._save()
                saved_at = self.state.step
            waiting_since = time.perf_counter()
        completed = self.state.step == self.limits.total_steps
        if completed and not self.eval_due(self.state.step):
            self._evaluate()
        if saved_at != self.state.step and (self.save_at_end or not completed):
            self._save()
        return "completed" if completed else "preempted"

    def _step(self, step: int, micro: Sequence[Any], waited: float) -> StepRecord | None:
        """One update; None when any rank was asked to stop."""
        started = time.perf_counter()
        work = [self.objective.work(batch) for batch in micro]
        (count, units, flops), stopping = self.mesh.sum_over_data(
            [sum(w.count for w in work), sum(w.units for w in work), sum(w.flops for w in work)],
            flag=self.stop.requested,
        )
        if stopping:
            return None
        # The generator of a step depends on the step alone: nothing to save, nothing to replay.
        self.mesh.device.seed(
            derive(self.seed, "step", step, self.mesh.data_rank, self.mesh.cp_rank, self.mesh.sp_rank)
        )
        loss = forward_backward(self.engine, self.objective, self.mesh, micro, max(count, 1.0))
        lr = self.lr_at(step)
        result = self.engine.step(lr)
        if self.step_done is not None and not result.skipped:
            self.step_done(step + 1)
        self._count(step, loss.mean, units, skipped=result.skipped)
        elapsed = time.perf_counter() - started + waited
        return StepRecord(
            step=self.state.step,
            epoch=self.state.step / self.limits.steps_per_epoch,
            loss=loss.mean,
            own_loss=loss.own,
            grad_norm=result.grad_norm,
            lr=lr,
            unit=self.objective.unit,
            units=self.state.units,
            step_time_s=elapsed,
            units_per_s=units / elapsed,
            mfu=self._mfu(flops, elapsed),
            peak_memory_bytes=self.mesh.device.peak_memory_bytes(),
            data_wait_s=waited,
            skipped=result.skipped,
        )

    def _count(self, step: int, loss: float, units: float, *, skipped: bool) -> None:
        state = self.state
        state.step = step + 1
        state.units += units
        state.first_loss = loss if state.first_loss is None else state.first_loss
        state.last_loss = loss
        state.loss_scale = self.engine.scale_state()
        state.skipped = state.skipped + 1 if skipped else 0
        if state.skipped >= self.limits.max_skipped_steps:
            raise TrainingStopped(
                f"{state.skipped} steps in a row up to step {state.step} had gradients that are not finite "
                f"(loss {loss}); none of them changed the weights. Lower optim.lr, lengthen the warm-up or check the "
                "data of these steps, and continue from the last checkpoint with checkpoint.resume=auto"
            )

    def _mfu(self, flops: float, seconds: float) -> float | None:
        peak = self.mesh.device.peak_flops
        return None if peak is None else flops / seconds / (peak * self.mesh.sizes.world)

    def _evaluate(self) -> None:
        if self.evaluate is not None:
            self.metrics = self.evaluate()
            self._call("evaluated", self.state.step, self.metrics)

    def _save(self) -> None:
        self.save(self.state)
        self._call("saved", self.state.step)

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*args)
