"""What a callback may hear. Most run on the main rank only, so none may call a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lctrain.train.checkpoint import TrainState


@dataclass(frozen=True)
class StepRecord:
    """What is known of a finished step. loss: mean over the global batch. own_loss: this rank's. units: so far."""

    step: int
    epoch: float
    loss: float
    own_loss: float
    grad_norm: float
    lr: float
    unit: str
    units: float
    step_time_s: float
    units_per_s: float
    mfu: float | None
    peak_memory_bytes: int
    data_wait_s: float
    skipped: bool

    def as_metrics(self) -> dict[str, Any]:
        """The record of metrics.jsonl."""
        return {
            "step": self.step,
            "epoch": round(self.epoch, 6),
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            self.unit: int(self.units),
            "step_time_s": round(self.step_time_s, 6),
            f"{self.unit}_per_s": round(self.units_per_s, 3),
            "mfu": self.mfu,
            "peak_memory_bytes": self.peak_memory_bytes,
            "data_wait_s": round(self.data_wait_s, 6),
            "skipped": self.skipped,
        }


class Callback:
    """Override what you need; every hook does nothing by default."""

    def start(self, state: TrainState, total_steps: int) -> None:
        """Before the first step of this process."""

    def step_end(self, record: StepRecord) -> None:
        """After a step."""

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """After an evaluation."""

    def saved(self, step: int) -> None:
        """After a checkpoint is whole."""

    def close(self, status: str) -> None:
        """Once, when the run ends, however it ends. status: completed, preempted or failed."""


def close_all(callbacks: Sequence[Callback], status: str, report: Callable[[str], None]) -> None:
    """Close each of them, whatever happens to the others; what fails is said, and the run is what it was."""
    for callback in callbacks:
        _close(callback, status, report)


def _close(callback: Callback, status: str, report: Callable[[str], None]) -> None:
    try:
        callback.close(status)
    except Exception as error:
        report(f"warning: {type(callback).__name__} did not end well: {type(error).__name__}: {error}")
