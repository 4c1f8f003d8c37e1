"""Learning-rate shapes after a linear warm-up; each a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import MISSING, require


@dataclass(kw_only=True)
class ScheduleConfig:
    """warmup_steps, or warmup_ratio of all steps (one of the two)."""

    kind: str = MISSING
    warmup_steps: int = 0
    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "must not be negative", "0 is off")
        require(
            0 <= self.warmup_ratio < 1,
            "schedule.warmup_ratio",
            self.warmup_ratio,
            "must be in [0, 1)",
            "e.g. 0.03 warms up over 3 % of the steps",
        )
        require(
            not (self.warmup_steps and self.warmup_ratio),
            "schedule.warmup_ratio",
            self.warmup_ratio,
            f"cannot be combined with schedule.warmup_steps={self.warmup_steps}",
            "keep one of the two",
        )


@dataclass(kw_only=True)
class ConstantConfig(ScheduleConfig):
    """lr after warm-up stays at optim.lr."""

    kind: str = "constant"


@dataclass(kw_only=True)
class DecayConfig(ScheduleConfig):
    """Schedules that fall to min_lr_ratio * optim.lr, which the step after the last would have."""

    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.min_lr_ratio <= 1,
            "schedule.min_lr_ratio",
            self.min_lr_ratio,
            "must be in [0, 1]",
            "0.1 ends at a tenth of optim.lr",
        )


@dataclass(kw_only=True)
class CosineConfig(DecayConfig):
    """Half a cosine."""

    kind: str = "cosine"


@dataclass(kw_only=True)
class LinearConfig(DecayConfig):
    """A straight line."""

    kind: str = "linear"


@dataclass(kw_only=True)
class PolynomialConfig(DecayConfig):
    """(1 - progress) ** power."""

    kind: str = "polynomial"
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.power > 0, "schedule.power", self.power, "must be positive", "2 is MLPerf's ResNet value")
