"""`python -m lctrain plan ...`: what a job takes and whether it fits, on a machine that is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lctrain.config.compose import compose_config
from lctrain.config.hardware import Hardware
from lctrain.config.parallel import SingleConfig
from lctrain.config.resolve import wanted_ranks
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_NO, EXIT_OK, ConfigError
from lctrain.runtime.ascend import import_torch
from lctrain.train.run_dir import default_run_dir, make_run_dir
from lctrain.verbs.train import show

if TYPE_CHECKING:
    from lctrain.plan.plan import Plan

FILE, PICTURE = "plan.json", "memory.png"


def run(command: Any) -> int:
    """Answer the one question of plan.*; exit 0 when the job fits, 3 when it does not."""
    if command.multirun:
        from lctrain.verbs.sweep import sweep

        return sweep(command)
    config = compose_config(command.overrides, config_dir=command.config_dir)
    if command.show_config:
        return show(config)
    return plan_config(config, config_dir=command.config_dir)


def plan_config(config: TrainConfig, *, config_dir: str | None = None) -> int:
    """Plan a typed config. Raises ConfigError, ModelError."""
    # Before torch is imported, which would remark on a job that does not run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import_torch(config.device)
    from lctrain.plan.detect import wanted

    hardware = wanted(config, config_dir=config_dir)
    ranks = config.plan.world_size or wanted_ranks(config)
    if isinstance(config.parallel, SingleConfig) and ranks > 1:
        raise ConfigError(
            f"plan.world_size={ranks} but parallel=single runs one rank; choose another layout, e.g. fsdp"
        )
    run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(f"{config.recipe}-plan")
    if (run_dir / FILE).exists():
        raise ConfigError(f"run_dir={run_dir} holds a plan; choose another, or leave run_dir out")
    if config.plan.layouts is not None:
        code = _layouts(config, hardware, ranks, run_dir)
    elif config.plan.max_length is not None:
        code = _longest(config, hardware, ranks, run_dir)
    elif config.plan.fit:
        code = _fit(config, hardware, ranks, run_dir)
    elif config.plan.calibrate:
        from lctrain.plan.calibrate import calibrate

        record = calibrate(config, hardware, ranks, run_dir, print)
        code = EXIT_OK
        _write(run_dir, record)
    else:
        code = _one(config, hardware, ranks, run_dir)
    print(f"run dir: {run_dir}", flush=True)
    return code


def _one(config: TrainConfig, hardware: Hardware, ranks: int, run_dir: Path) -> int:
    from importlib.util import find_spec

    from lctrain.plan.picture import draw_timeline
    from lctrain.plan.plan import make_plan
    from lctrain.plan.report import lines

    plan, simulation = make_plan(config, hardware, ranks)
    _say(lines(plan))
    _write(run_dir, plan.as_record())
    if find_spec("matplotlib") is not None:
        draw_timeline(plan, simulation, run_dir / PICTURE)
    return _code(plan)


def _layouts(config: TrainConfig, hardware: Hardware, ranks: int, run_dir: Path) -> int:
    from lctrain.plan.layouts import compare
    from lctrain.plan.report import table

    outcomes = compare(config, hardware, ranks, print)
    _say(table(outcomes, hardware))
    records = [
        {"words": list(o.words), **({"reason": o.reason} if o.plan is None else o.plan.as_record())} for o in outcomes
    ]
    best = outcomes[0].plan
    fits = best is not None and best.fits
    if best is not None and fits:
        print(f"fastest that fits: {' '.join(outcomes[0].words)}")
    else:
        print("nothing fits: take more devices, a shorter data.max_length, or adapters (model.lora.rank=16)")
    first = best.as_record() if best is not None else {"fits": False}
    _write(run_dir, first | {"layouts": records})
    return EXIT_OK if fits else EXIT_NO


def _longest(config: TrainConfig, hardware: Hardware, ranks: int, run_dir: Path) -> int:
    from lctrain.plan.search import longest

    length, plan = longest(config, hardware, ranks, print)
    asked = config.documents.max_length
    print(f"longest sequence that fits: data.max_length={length} ({length / asked:.3g} x the job's {asked:,})")
    print("a length beyond what the model was made for also needs model.rope_scaling")
    _write(run_dir, plan.as_record() | {"max_length": length})
    return EXIT_OK


def _fit(config: TrainConfig, hardware: Hardware, ranks: int, run_dir: Path) -> int:
    from lctrain.plan.layouts import attempt
    from lctrain.plan.report import verdict
    from lctrain.plan.search import fewest_changes

    now = attempt(config, hardware, ranks, ())
    if now.plan is None:
        raise ConfigError(str(now.reason))
    print(verdict(now.plan))
    found = now if now.plan.fits else fewest_changes(config, hardware, ranks, print)
    if found is None or found.plan is None:
        print("no three changes make it fit: take more devices, a shorter data.max_length, or model.lora.rank=16")
        _write(run_dir, now.plan.as_record() | {"changes": None})
        return EXIT_NO
    print(f"add: {' '.join(found.words)}" if found.words else "nothing to change")
    _write(run_dir, found.plan.as_record() | {"changes": list(found.words)})
    return EXIT_OK


def _code(plan: Plan) -> int:
    return EXIT_OK if plan.fits else EXIT_NO


def _say(text: Iterable[str]) -> None:
    for line in text:
        print(line)


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    make_run_dir(run_dir)
    (run_dir / FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
