"""`python -m lctrain selftest device=npu|cuda|cpu`: prove the program on this machine's devices, in one report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from lctrain.config.compose import compose_config
from lctrain.config.resolve import resolve
from lctrain.config.root import Device, TrainConfig
from lctrain.errors import EXIT_NO, EXIT_OK, ConfigError, LctrainError
from lctrain.runtime.process import read_ranks
from lctrain.train.run_dir import default_run_dir, make_run_dir

REPORT = "selftest.md"
# Enough heads for Ulysses and enough matrices for a figure, on up to eight ranks.
_MODEL = (
    "recipe=llama_tiny_32k",
    "parallel=fsdp_sp",
    "schedule.warmup_steps=0",
    "optim.eps=1e-3",  # so that Adam does not blow rounding in tiny gradients up to whole steps
    "model.architecture.hidden_size=256",
    "model.architecture.intermediate_size=512",
    "model.architecture.num_attention_heads=16",
    "model.architecture.num_key_value_heads=8",
    "data.max_length=2048",
    "data.path=unread",
    "data.tokenizer=byte",
)
_TAKEN = ("device=", "launch.nproc_per_node=", "run_dir=")
_MOST_RANKS = 8
_MEMORY_TOLERANCE = 0.1  # an allocator rounds small tensors up


def run(command: Any) -> int:
    """Test on this machine's devices; exit 0 when everything holds, 3 when something differs."""
    for word in command.overrides:
        if not word.startswith(_TAKEN):
            raise ConfigError(
                f"{word} has no effect on selftest, which takes device=auto, npu, cuda or cpu, "
                "launch.nproc_per_node=N and run_dir=DIR; leave it out"
            )
    launcher = read_ranks().launcher
    if launcher is not None:
        raise ConfigError(f"selftest starts ranks of its own, and {launcher} started this; run it without {launcher}")
    if command.show_config or command.config_dir:
        raise ConfigError("selftest has a configuration of its own; it has no --print-config and no --config-dir")
    config = _sized(compose_config([*_MODEL, *command.overrides]))
    run_dir = Path(config.run_dir) if config.run_dir else default_run_dir("selftest")
    if (run_dir / REPORT).exists():
        raise ConfigError(f"run_dir={run_dir} holds a report already; give another run_dir, or move it away")
    make_run_dir(run_dir)
    return _run(config, run_dir)


def _sized(config: TrainConfig) -> TrainConfig:
    """On every device of this machine that divides the work, two ranks on a CPU."""
    from lctrain.runtime.ascend import import_torch
    from lctrain.runtime.device import count, wanted_type

    import_torch(config.device)
    kind = wanted_type(config.device)
    devices = count(kind) or 2
    ranks = config.launch.nproc_per_node or max(n for n in (1, 2, 4, _MOST_RANKS) if n <= devices)
    if ranks not in (1, 2, 4, _MOST_RANKS):
        raise ConfigError(f"launch.nproc_per_node={ranks} must be 1, 2, 4 or 8: what the test's 16 heads divide over")
    train = replace(config.train, global_batch_size=2 * ranks, max_steps=1)
    launch = replace(config.launch, nproc_per_node=ranks)
    return replace(config, device=Device[kind], train=train, launch=launch)


def _run(config: TrainConfig, run_dir: Path) -> int:
    """Doctor here, the ranks' part in processes of its own, then the plan against measured steps."""
    from lctrain.doctor.facts import gather
    from lctrain.doctor.report import examine, lines
    from lctrain.launch.start import start
    from lctrain.selftest.job import RESULTS
    from lctrain.selftest.report import markdown, verdict
    from lctrain.selftest.row import Row

    findings = lines(config.device.name, examine(gather(config.device)))
    code = start("selftest", resolve(config), run_dir)
    if code != EXIT_OK:
        return code
    results = json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))
    rows = [Row(**row) for row in results["rows"]]
    # Written twice: what fails from here on must not lose what was found.
    (run_dir / REPORT).write_text(markdown(results, rows, findings), encoding="utf-8")
    rows += _measured(config, run_dir, results)
    (run_dir / REPORT).write_text(markdown(results, rows, findings), encoding="utf-8")
    print(verdict(rows))
    print(f"report: {run_dir / REPORT}", flush=True)
    return EXIT_OK if all(row.ok for row in rows) else EXIT_NO


def _measured(config: TrainConfig, run_dir: Path, results: dict[str, Any]) -> list[Any]:
    """The memory plan of a short job against its measured steps, and their speed."""
    from lctrain.config.hardware import hardware_called
    from lctrain.plan.calibrate import calibrate
    from lctrain.plan.detect import cpu_of, named
    from lctrain.selftest.row import Row

    section, memory = "plan and speed", results["memory_bytes"]
    if config.device is not Device.cpu and hardware_called(results["device"]) is None:
        return [Row(section, "memory", f"not planned: there is no conf/hardware file for {results['device']}")]
    hardware = cpu_of(memory) if config.device is Device.cpu else named(results["device"], memory)
    try:
        found = calibrate(config, hardware, results["ranks"], run_dir, print)
    except (LctrainError, RuntimeError) as failure:
        return [Row(section, "peak of tensor memory", str(failure).partition("\n")[0], math.inf, _MEMORY_TOLERANCE)]
    planned, measured = found["tensor_bytes"], found["measured"]
    tokens = config.train.global_batch_size * config.documents.max_length / measured["step_s"]
    detail = f"planned {planned / 2**20:.1f} MiB, measured {measured['peak_bytes'] / 2**20:.1f} MiB"
    return [
        Row(section, "peak of tensor memory", detail, abs(planned / measured["peak_bytes"] - 1), _MEMORY_TOLERANCE),
        Row(section, "speed", f"{tokens:,.0f} tokens/s, {measured['step_s'] * 1e3:.3g} ms a step of fsdp_sp in fp32"),
    ]
