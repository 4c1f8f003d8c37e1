"""The plan of the job that runs: said when it is made, and held against what the first steps took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lctrain.runtime.mesh import Mesh
from lctrain.train.callbacks.base import Callback, StepRecord
from lctrain.train.checkpoint import TrainState

_SETTLED_STEPS = 2


class Planned(Callback):
    """Starts a process that plans (lctrain/plan/at_start.py) and reads what it says between steps."""

    def __init__(self, config: Path, *, mesh: Mesh, ranks_here: int, report: Callable[[str], None]) -> None:
        self._config, self._report = config, report
        device = mesh.device
        memory = device.total_memory_bytes() // (ranks_here if device.type == "cpu" else 1)
        self._job = [str(mesh.sizes.world), device.type, device.name, str(memory)]
        self._process: subprocess.Popen[str] | None = None
        self._plan: dict[str, Any] = {}
        self._steps = 0

    def start(self, state: TrainState, total_steps: int) -> None:
        """Begin to plan, as a process that no launcher's variables reach."""
        kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not k.startswith("LCTRAIN_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lctrain.plan.at_start", str(self._config), *self._job],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # It must not open a device, which would take of the job's memory.
            env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""},
        )

    def step_end(self, record: StepRecord) -> None:
        """Say the plan once it is there, and the comparison once steps are what they will be."""
        self._steps += 1
        if self._process is not None and self._process.poll() is not None:
            self._read(self._process)
            self._process = None
        if self._plan.get("tensor_bytes") and self._steps >= _SETTLED_STEPS:
            self._compare(record.peak_memory_bytes)
            self._plan = {}

    def close(self, status: str) -> None:
        """A plan that is not ready is not wanted any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        text = process.stdout.read()
        process.stdout.close()
        try:
            self._plan = json.loads(text)
        except ValueError:
            self._plan = {"line": f"plan: none (planning ended with code {process.returncode})"}
        self._report(self._plan["line"])

    def _compare(self, measured: int) -> None:
        predicted = self._plan["tensor_bytes"]
        what = "tensors"
        if self._plan["whole_process"]:  # all that is known of a process on a CPU is the whole of it
            predicted, what = predicted + self._plan["reserve_bytes"], "tensors and the process itself"
        self._report(
            f"plan: predicted peak {predicted / 2**30:.2f} GiB ({what}), measured {measured / 2**30:.2f} GiB "
            f"({predicted / measured:.2f})"
        )


_LAUNCHER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
