"""What a person sees while it trains: a progress bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState


class Console(Callback):
    """Loss, speed, MFU, memory and time left."""

    def __init__(self, report: Callable[[str], None], *, every_steps: int, bar: bool) -> None:
        self._report = report
        self._every = every_steps
        self._bar = _Bar() if bar else None
        self._total = 0
        self._first = 0
        self._since = 0.0

    def start(self, state: TrainState, total_steps: int) -> None:
        """Remember where this process began, for the time left."""
        self._total, self._first, self._since = total_steps, state.step, time.perf_counter()
        if self._bar:
            self._bar.start(state.step, total_steps)

    def step_end(self, record: StepRecord) -> None:
        """Update the bar, or print every logged step, the first and the last."""
        if self._bar:
            self._bar.update(record.step, self._short(record))
        elif record.step % self._every == 0 or record.step in (1, self._total):
            self._report(f"step {record.step}/{self._total}  {self._line(record)}  left {self._left(record.step)}")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """One line an evaluation."""
        parts = "  ".join(f"{k.removeprefix('eval_')} {v:.6g}" for k, v in metrics.items())
        self._report(f"eval at step {step}: {parts}")

    def saved(self, step: int) -> None:
        """One line a checkpoint."""
        self._report(f"checkpoint of step {step} saved")

    def close(self, status: str) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()

    @staticmethod
    def _line(record: StepRecord) -> str:
        mfu = "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
        skipped = "  SKIPPED: gradients not finite" if record.skipped else ""
        return (
            f"loss {record.loss:.4f}  grad norm {record.grad_norm:.3g}  lr {record.lr:.3g}  "
            f"{record.units_per_s:,.0f} {record.unit}/s{mfu}  peak {record.peak_memory_bytes / 2**30:.2f} GiB"
            f"  {record.step_time_s:.2f} s{skipped}"
        )

    @staticmethod
    def _short(record: StepRecord) -> str:
        """What fits beside the bar on a terminal of 80 columns."""
        mfu = "" if record.mfu is None else f"  MFU {record.mfu:.0%}"
        skipped = "  SKIPPED" if record.skipped else ""
        memory = f"{record.peak_memory_bytes / 2**30:.1f} GiB"
        return f"loss {record.loss:.3f}  {record.units_per_s:,.0f} {record.unit}/s{mfu}  {memory}{skipped}"

    def _left(self, step: int) -> str:
        each = (time.perf_counter() - self._since) / max(1, step - self._first)
        seconds = round(each * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class _Bar:
    """rich's progress bar; text printed meanwhile scrolls above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            MofNCompleteColumn(), BarColumn(bar_width=12), TimeRemainingColumn(), TextColumn("{task.description}")
        )
        self._task = self._progress.add_task("", total=None)

    def start(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
        self._progress.start()

    def update(self, done: int, text: str) -> None:
        self._progress.update(self._task, completed=done, description=text)

    def stop(self) -> None:
        self._progress.stop()
