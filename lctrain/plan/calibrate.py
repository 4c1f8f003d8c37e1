"""Predicted against measured: the job's own first steps on the device at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lctrain.config.hardware import GIB, Hardware
from lctrain.config.resolve import resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_OK, DeviceError
from lctrain.launch.start import start
from lctrain.plan.job import without_data
from lctrain.plan.measure import MEASURED
from lctrain.plan.plan import make_plan


def calibrate(
    config: TrainConfig, hardware: Hardware, ranks: int, run_dir: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run steps on real ranks, plan the same, and say both. Raises DeviceError when the steps fail."""
    run_dir.mkdir(parents=True, exist_ok=True)
    code = start("measure", resolve(without_data(config, ranks)), run_dir)
    if code != EXIT_OK:
        raise DeviceError(f"the measured steps ended with exit code {code}; what failed is above")
    measured = json.loads((run_dir / MEASURED).read_text(encoding="utf-8"))
    plan, _ = make_plan(config, hardware, ranks)
    memory, seconds = measured["peak_bytes"], measured["step_s"]
    report(f"tensor memory: predicted {plan.peak.bytes / GIB:.3f} GiB, measured {memory / GIB:.3f} GiB "
           f"({plan.peak.bytes / memory:.3f})")  # fmt: skip
    report(f"step: predicted {plan.time.step_s:.4g} s, measured {seconds:.4g} s ({plan.time.step_s / seconds:.3f})")
    peak = hardware.peak_tflops[config.precision.kind] * plan.time.step_s / seconds
    report(
        f"plan.peak_tflops={peak:.3g} plan.bandwidth_tb_s={hardware.bandwidth_tb_s * plan.time.step_s / seconds:.3g} "
        "would bring the predicted step near the measured one"
    )
    return plan.as_record() | {"measured": measured}
