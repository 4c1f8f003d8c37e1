"""The longest sequence that fits, and the fewest changes that make a job fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lctrain.config import parallel as layouts
from lctrain.config.hardware import Hardware
from lctrain.config.language_checks import architecture
from lctrain.config.memory import Recompute
from lctrain.config.model import CausalLMConfig, RopeConfig
from lctrain.config.parallel import FsdpConfig, ParallelConfig
from lctrain.config.resolve import resolve
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError, LctrainError
from lctrain.plan.derived import quick_plan
from lctrain.plan.job import without_data
from lctrain.plan.layouts import Outcome, attempt, model_counts, refused_by_hand
from lctrain.plan.plan import Plan

STEP_TOKENS = 1024
_MOST = 2**26


def longest(config: TrainConfig, hardware: Hardware, ranks: int, report: Callable[[str], None]) -> tuple[int, Plan]:
    """(tokens, its plan), to a multiple of STEP_TOKENS. Memory decides; the model's position range is not asked.

    Raises ConfigError when not even the shortest sequence fits.
    """
    if not isinstance(config.model, CausalLMConfig):
        raise ConfigError(f"plan.max_length=auto is for sequences and model={config.model.kind} has none; leave it out")
    multiple = resolve(without_data(config, ranks), world_size=ranks).sizes.length_multiple
    step = STEP_TOKENS * max(1, multiple // STEP_TOKENS) if STEP_TOKENS % multiple == 0 else STEP_TOKENS * multiple
    best: tuple[int, Plan] | None = None
    low, high = 0, _MOST // step
    trial = max(1, config.documents.max_length // step)
    while low < trial < high:
        plan = quick_plan(_with_length(config, trial * step), hardware, ranks)
        report(f"{trial * step:>12,} tokens: {plan.peak_bytes / 2**30:7.2f} GiB")
        if plan.fits:
            low, best = trial, (trial * step, plan)
        else:
            high = trial
        trial = _next(low, high, plan, trial)
    if best is None:
        raise ConfigError(
            f"not even {step:,} tokens fit on {hardware.title}; shard over more devices, or ask what helps with "
            "plan.fit=true"
        )
    return best


def _next(low: int, high: int, plan: Plan, trial: int) -> int:
    """Where a line through what a step holds without a sequence and what it held now meets what is usable.

    A step beyond what is known to fit when the line says no more, which settles it where memory is linear.
    """
    fixed = sum(plan.peak.by_category[n] for n in ("parameters", "master_weights", "gradients", "optimizer_state"))
    fixed += sum(plan.reserve.values())
    room, used = plan.hardware.usable_bytes - fixed, plan.peak_bytes - fixed
    guess = int(trial * room / used) if used > 0 and room > 0 else (low + high) // 2
    if guess <= low:
        return low + 1 if low + 1 < high else low
    return min(guess, high - 1)


def _with_length(config: TrainConfig, length: int) -> TrainConfig:
    raw = dict(architecture(config)) | {"max_position_embeddings": max(length, 1)}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(raw.get(name), dict):
            raw[name] = {k: v for k, v in raw[name].items() if k in ("rope_theta",)} or None
    raw = {k: v for k, v in raw.items() if v is not None}
    model = replace(config.language_model, path=None, architecture=raw, rope_scaling=RopeConfig())
    return replace(config, model=model, data=replace(config.documents, max_length=length))


@dataclass(frozen=True)
class Change:
    """One thing to change. kind: changes of one kind exclude each other."""

    kind: str
    words: tuple[str, ...]
    apply: Callable[[TrainConfig], TrainConfig]


def fewest_changes(
    config: TrainConfig, hardware: Hardware, ranks: int, report: Callable[[str], None]
) -> Outcome | None:
    """The first fitting set, of one change, then two, then three; the cheaper ones first. None when nothing fits."""
    counts = model_counts(config)
    for chosen in _sets(list(_changes(config, ranks))):
        words = tuple(w for change in chosen for w in change.words)
        changed = config
        try:
            for change in chosen:
                changed = change.apply(changed)
            if refused_by_hand(changed, hardware, ranks, counts):
                continue
        except LctrainError:
            continue
        outcome = attempt(changed, hardware, ranks, words)
        if outcome.plan is None:
            continue
        report(f"{outcome.plan.peak_bytes / 2**30:7.2f} GiB with {' '.join(words)}")
        if outcome.plan.fits:
            return outcome
    return None


def _sets(changes: list[Change]) -> Iterator[tuple[Change, ...]]:
    for count in (1, 2, 3):
        for chosen in combinations(changes, count):
            if len({change.kind for change in chosen}) == count:
                yield chosen


def _changes(config: TrainConfig, ranks: int) -> Iterator[Change]:
    """What may be changed, from what costs least time to what costs most."""
    micro = config.train.micro_batch_size
    if micro > 1:
        smaller = micro // 2
        while smaller >= 1:
            yield _micro(smaller)
            smaller //= 4
    if not isinstance(config.model, CausalLMConfig):
        return
    if config.memory.loss_chunk_mb > 64:
        yield Change("loss", ("memory.loss_chunk_mb=64",), _memory(loss_chunk_mb=64))
    if ranks > 1:
        for parallel in (layouts.FsdpConfig(), layouts.FsdpSpConfig()):
            if type(config.parallel) is not type(parallel):
                yield Change("parallel", (f"parallel={parallel.kind}",), _layout(parallel))
    rungs = (Recompute.none, Recompute.selective, Recompute.full, Recompute.offload)
    for recompute in rungs[rungs.index(config.memory.recompute) + 1 :]:
        yield Change("memory", (f"memory={recompute.name}",), _memory(recompute=recompute))
    if config.memory.tiled_mlp is None:
        yield Change("mlp", ("memory.tiled_mlp=8",), _memory(tiled_mlp=8))
    if isinstance(config.parallel, FsdpConfig) and not config.parallel.offload_params:
        offloaded = replace(config.parallel, offload_params=True)
        yield Change("offload", ("parallel.offload_params=true",), _layout(offloaded))
    elif ranks > 1:
        words = ("parallel=fsdp", "parallel.offload_params=true")
        yield Change("parallel", words, _layout(layouts.FsdpConfig(offload_params=True)))


def _micro(size: int) -> Change:
    def apply(config: TrainConfig) -> TrainConfig:
        return replace(config, train=replace(config.train, micro_batch_size=size))

    return Change("micro", (f"train.micro_batch_size={size}",), apply)


def _layout(parallel: ParallelConfig) -> Callable[[TrainConfig], TrainConfig]:
    return lambda c: replace(c, parallel=parallel)


def _memory(**changes: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda c: replace(c, memory=replace(c.memory, **changes))
