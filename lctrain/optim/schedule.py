"""Learning rates: pure functions of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from lctrain.config.optim import OptimConfig
from lctrain.config.schedule import (
    ConstantConfig,
    CosineConfig,
    DecayConfig,
    LinearConfig,
    PolynomialConfig,
    ScheduleConfig,
    StepConfig,
)


def describe_peak(config: OptimConfig, global_batch_size: int) -> str:
    """How the peak rate came about, for the log."""
    peak = config.peak_lr(global_batch_size)
    if config.base_lr_per is None:
        return f"learning rate: peak {peak:g} (optim.lr)"
    return (
        f"learning rate: peak {peak:g} = optim.lr {config.lr:g} x batch {global_batch_size:,} / {config.base_lr_per:,}"
    )


def lr_factor(
    config: ScheduleConfig, step: int, total_steps: int, *, steps_per_epoch: float = 1.0, peak: float = 1.0
) -> float:
    """Factor on the peak rate for the update that `step` (counted from 0) makes.

    Warm-up is linear over W steps, reaching 1 on step W - 1; the decay starts from 1 on step W and would
    reach its floor on the step after the last, so that no step is spent at a rate of zero.
    steps_per_epoch: for what is given in epochs. peak: the peak rate, for a floor given as a rate.
    """
    warmup = warmup_steps(config, total_steps, steps_per_epoch=steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    match config:
        case ConstantConfig():
            return 1.0
        case StepConfig():
            return config.gamma ** sum(step >= round(epoch * steps_per_epoch) for epoch in config.epochs)
    assert isinstance(config, DecayConfig)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = config.min_lr_ratio if config.end_lr is None else config.end_lr / peak
    return floor + (1.0 - floor) * _decay(config, progress)


def warmup_steps(config: ScheduleConfig, total_steps: int, *, steps_per_epoch: float = 1.0) -> int:
    """Warm-up in steps, from whichever field is given."""
    if config.warmup_epochs:
        return round(config.warmup_epochs * steps_per_epoch)
    return config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)


def _decay(config: DecayConfig, progress: float) -> float:
    match config:
        case CosineConfig():
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case LinearConfig():
            return 1.0 - progress
        case PolynomialConfig():
            return (1.0 - progress) ** config.power
    raise AssertionError(type(config))
