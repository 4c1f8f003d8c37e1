"""metrics.jsonl: a record a logged step, flushed at once so that a killed run keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.run_dir import json_ready


class MetricsFile(Callback):
    """Appends records; not-a-number is written as null, which JSON can hold."""

    def __init__(self, path: Path, *, every_steps: int) -> None:
        self._stream = path.open("a", encoding="utf-8")
        self._every = every_steps

    def step_end(self, record: StepRecord) -> None:
        """Write every logged step, and the first."""
        if record.step % self._every == 0 or record.step == 1:
            self._write(record.as_metrics())

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Evaluations have records of their own."""
        self._write({"step": step, **metrics})

    def close(self, status: str) -> None:
        """Close the file."""
        self._stream.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(json_ready(record)) + "\n")
        self._stream.flush()
