"""Every layout and kind of recomputation a job could run under, planned and ranked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from lctrain.config import parallel as layouts
from lctrain.config.hardware import Hardware
from lctrain.config.memory import Recompute
from lctrain.config.model import CausalLMConfig
from lctrain.config.parallel import ParallelConfig
from lctrain.config.precision import Fp32Config
from lctrain.config.registry import classes
from lctrain.config.resolve import resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError, LctrainError
from lctrain.plan.job import without_data
from lctrain.plan.plan import Plan
from lctrain.train.memory_check import ModelCounts, state_bytes

LEANEST_FIRST = (Recompute.offload, Recompute.full, Recompute.selective, Recompute.none)
"""When one does not fit, those after it do not either."""


@dataclass(frozen=True)
class Candidate:
    """A layout and what it was asked for with. words: overrides that select it."""

    words: tuple[str, ...]
    parallel: ParallelConfig


@dataclass(frozen=True)
class Outcome:
    """A planned variant: its overrides, and the plan or why there is none."""

    words: tuple[str, ...]
    plan: Plan | None = None
    reason: str | None = None


def candidates(names: Any, ranks: int, *, language: bool) -> list[Candidate]:
    """The layouts of plan.layouts with the sizes worth comparing. Raises ConfigError for an unknown name."""
    known = classes("parallel")
    wanted = list(known) if names == "all" else list(names)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"plan.layouts: {name} is not a layout; layouts are {', '.join(known)}")
    return [c for name in wanted for c in _sized(name, known[name], ranks) if language or name in _FOR_IMAGES]


_FOR_IMAGES = ("single", "ddp", "fsdp", "hsdp")


def _sized(name: str, kind: type, ranks: int) -> Iterator[Candidate]:
    """A layout with all ranks in its axis, and with half of them where that leaves an axis of 2 or more."""
    if (name == "single") != (ranks == 1):
        return
    field = {"fsdp_sp": "sp_size", "zero3_sp": "sp_size", "fsdp_cp": "cp_size", "fsdp_tp": "tp_size"}.get(name)
    if name == "fsdp_usp" and ranks >= 4:
        yield Candidate((f"parallel={name}", f"parallel.sp_size={ranks // 2}", "parallel.cp_size=2"),
                        layouts.FsdpUspConfig(sp_size=ranks // 2, cp_size=2))  # fmt: skip
    elif field is not None:
        for size in [ranks, *([ranks // 2] if ranks >= 4 else [])]:
            yield Candidate((f"parallel={name}", f"parallel.{field}={size}"), kind(**{field: size}))
    elif name != "fsdp_usp" and not (name == "hsdp" and ranks < 4):
        yield Candidate((f"parallel={name}",), kind())


def compare(config: TrainConfig, hardware: Hardware, ranks: int, report: Callable[[str], None]) -> list[Outcome]:
    """Plan every candidate, as many at once as there are cores; those that fit first, fastest first.

    report: told of each layout that is done. Raises ConfigError.
    """
    language = isinstance(config.model, CausalLMConfig)
    found = candidates(config.plan.layouts, ranks, language=language)
    counts = model_counts(config)
    tasks = [(config, hardware, ranks, candidate, counts) for candidate in found]
    outcomes: list[list[Outcome]] = []
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1, 4), mp_context=get_context("spawn")) as pool:
        for group in pool.map(_variants, tasks):
            outcomes.append(group)
            report(f"{len(outcomes)} of {len(tasks)}: {' '.join(group[0].words)}")
    return sorted((o for group in outcomes for o in group), key=_rank)


def _rank(outcome: Outcome) -> tuple[int, float]:
    plan = outcome.plan
    if plan is None:
        return 2, 0.0
    return (0, plan.time.step_s / plan.units) if plan.fits else (1, float(plan.peak_bytes))


def _variants(task: tuple[TrainConfig, Hardware, int, Candidate, ModelCounts | None]) -> list[Outcome]:
    config, hardware, ranks, candidate, counts = task
    config = replace(config, parallel=candidate.parallel)
    words = candidate.words
    try:
        refused = refused_by_hand(config, hardware, ranks, counts)
    except LctrainError as error:
        return [Outcome(words, reason=str(error))]
    if refused is not None:
        return [Outcome(words, reason=refused)]
    if not isinstance(config.model, CausalLMConfig):
        return [attempt(config, hardware, ranks, words)]
    outcomes: list[Outcome] = []
    for recompute in LEANEST_FIRST:
        this = replace(config, memory=replace(config.memory, recompute=recompute))
        outcome = attempt(this, hardware, ranks, (*words, f"memory={recompute.name}"))
        outcomes.append(outcome)
        if outcome.plan is not None and not outcome.plan.fits:
            break
    return outcomes


def attempt(config: TrainConfig, hardware: Hardware, ranks: int, words: Sequence[str]) -> Outcome:
    """A quick plan, or why there is none."""
    from lctrain.plan.derived import quick_plan

    try:
        return Outcome(tuple(words), quick_plan(config, hardware, ranks))
    except LctrainError as error:
        return Outcome(tuple(words), reason=str(error))


def refused_by_hand(config: TrainConfig, hardware: Hardware, ranks: int, counts: ModelCounts | None) -> str | None:
    """Why the state alone does not fit, if it does not. Raises ConfigError when the layout cannot be.

    counts: None for an image model, whose state comes nowhere near a device's memory.
    """
    resolved = resolve(without_data(config, ranks), world_size=ranks)
    if counts is None:
        return None
    compute_bytes = 4 if isinstance(config.precision, Fp32Config) else 2
    state = state_bytes(resolved, counts, compute_bytes).device
    if state <= hardware.usable_bytes:
        return None
    return (
        f"{state / 1e9:.1f} GB of weights, gradients and optimizer state a rank, and "
        f"{hardware.usable_bytes / 1e9:.1f} GB are usable"
    )


def model_counts(config: TrainConfig) -> ModelCounts | None:
    """Count a language model on meta. Raises ConfigError, ModelError."""
    if not isinstance(config.model, CausalLMConfig):
        return None
    from lctrain.models.build import build_model
    from lctrain.models.check import read_config
    from lctrain.train.language_input import counts_of

    hf_config = read_config(config.language_model, max_length=config.documents.max_length)
    return counts_of(build_model(config.language_model, hf_config))
