"""`python -m lctrain.plan.at_start CONFIG RANKS TYPE NAME BYTES`: the plan of a job that has just started.

One JSON line. A process of its own, because a plan wants fake process groups and the job has real ones; it is told the
device's type, name and memory, because asking the device would take some of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from lctrain.config.plain import load
from lctrain.config.root import Device
from lctrain.errors import EXIT_OK, LctrainError


def main() -> int:
    """Print {line, tensor_bytes, reserve_bytes}, or {line} that says why there is no plan."""
    path, ranks, device_type, name, memory = sys.argv[1:]
    with contextlib.suppress(OSError):
        os.nice(10)  # the job comes first
    try:
        with contextlib.redirect_stdout(sys.stderr):
            record = _plan(Path(path), int(ranks), device_type, name, int(memory))
    except LctrainError as error:
        record = {"line": f"plan: none ({error})"}
    print(json.dumps(record), flush=True)
    return EXIT_OK


def _plan(path: Path, ranks: int, device_type: str, name: str, memory: int) -> dict[str, object]:
    from lctrain.plan.derived import quick_plan
    from lctrain.plan.detect import cpu_of, named, wanted
    from lctrain.plan.report import one_line

    config = load(path)
    config.device = Device.cpu  # the job has the cards to itself
    if config.plan.device is not None:
        hardware = wanted(config)
    else:
        found = cpu_of(memory) if device_type == "cpu" else named(name, memory)
        hardware = found.with_overrides(config.plan, config.precision.kind)
    plan = quick_plan(config, hardware, ranks)
    return {
        "line": one_line(plan),
        "tensor_bytes": plan.peak.bytes,
        "reserve_bytes": sum(plan.reserve.values()),
        "whole_process": hardware.type == "cpu",
    }


if __name__ == "__main__":
    sys.exit(main())
