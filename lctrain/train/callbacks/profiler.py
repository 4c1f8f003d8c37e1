"""A few steps under the device's profiler, one file or folder a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lctrain.runtime.device import Accelerator
from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState

WARM_UP = 2
"""Steps that are not traced: they compile, allocate and meet other ranks for the first time."""


class Profiler(Callback):
    """Traces `steps` steps of this process after its first WARM_UP, into `folder`; see Accelerator.traced."""

    def __init__(
        self, folder: Path, *, device: Accelerator, rank: int, steps: int, report: Callable[[str], None]
    ) -> None:
        self._folder, self._device, self._rank, self._steps, self._report = folder, device, rank, steps, report
        self._begin, self._traced = 0, ExitStack()

    def start(self, state: TrainState, total_steps: int) -> None:
        """Know which steps; a run too short to warm up is traced from its first."""
        self._begin = state.step + min(WARM_UP, max(0, total_steps - state.step - self._steps))
        self._at(state.step)

    def step_end(self, record: StepRecord) -> None:
        """Begin or end between two steps."""
        self._at(record.step)

    def close(self, status: str) -> None:
        """A run that ends early keeps what was traced."""
        self._traced.close()

    def _at(self, step: int) -> None:
        if step == self._begin:
            self._traced.enter_context(self._device.traced(self._folder, self._rank))
        elif step == self._begin + self._steps:
            self._traced.close()
            self._report(f"profile: steps {self._begin + 1} to {step} of every rank in {self._folder}")
