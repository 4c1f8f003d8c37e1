"""TensorBoard scalars under the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes train/* every logged step and eval/* at evaluations."""

    def __init__(self, folder: Path, *, every_steps: int) -> None:
        self._folder = folder
        self._every = every_steps
        self._writer: SummaryWriter | None = None

    def start(self, state: TrainState, total_steps: int) -> None:
        """Open the writer; steps a killed run had logged after its checkpoint are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=state.step + 1 if state.step else None)

    def step_end(self, record: StepRecord) -> None:
        """Scalars of the step."""
        if record.step % self._every == 0:
            for key, value in record.as_metrics().items():
                if key not in ("step", "skipped") and value is not None:
                    self._add(f"train/{key}", value, record.step)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Scalars of the evaluation."""
        for key, value in metrics.items():
            self._add(f"eval/{key.removeprefix('eval_')}", value, step)

    def close(self, status: str) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        assert self._writer is not None
        self._writer.add_scalar(name, value, step)
