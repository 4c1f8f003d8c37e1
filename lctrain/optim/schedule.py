"""Learning rates: pure functions of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from lctrain.config.schedule import (
    ConstantConfig,
    CosineConfig,
    DecayConfig,
    LinearConfig,
    PolynomialConfig,
    ScheduleConfig,
)


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor on the peak rate for the update that `step` (counted from 0) makes.

    Warm-up is linear over W steps, reaching 1 on step W - 1; the decay starts from 1 on step W and would
    reach min_lr_ratio on the step after the last, so that no step is spent at a rate of zero.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(config, ConstantConfig):
        return 1.0
    assert isinstance(config, DecayConfig)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = config.min_lr_ratio
    return floor + (1.0 - floor) * _decay(config, progress)


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Warm-up in steps, from either field."""
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
