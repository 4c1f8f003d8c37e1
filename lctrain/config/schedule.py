"""Learning-rate shapes after a linear warm-up; each a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lctrain.config.checks import MISSING, require


@dataclass(kw_only=True)
class ScheduleConfig:
    """warmup_steps, or warmup_ratio of all steps, or warmup_epochs (one of the three)."""

    kind: str = MISSING
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    warmup_epochs: float = 0.0

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
            self.warmup_epochs >= 0, "schedule.warmup_epochs", self.warmup_epochs, "must not be negative", "0 is off"
        )
        ways = {n: getattr(self, f"warmup_{n}") for n in ("steps", "ratio", "epochs")}
        given = [(f"schedule.warmup_{name}", value) for name, value in ways.items() if value]
        if len(given) > 1:
            (first, one), (second, other) = given[:2]
            require(False, second, other, f"cannot be combined with {first}={one}", "keep one of the two")


@dataclass(kw_only=True)
class ConstantConfig(ScheduleConfig):
    """lr after warm-up stays at optim.lr."""

    kind: str = "constant"


@dataclass(kw_only=True)
class DecayConfig(ScheduleConfig):
    """Schedules that fall to min_lr_ratio of the peak rate, or to end_lr; the step after the last would have it."""

    min_lr_ratio: float = 0.0
    end_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.min_lr_ratio <= 1,
            "schedule.min_lr_ratio",
            self.min_lr_ratio,
            "must be in [0, 1]",
            "0.1 ends at a tenth of optim.lr",
        )
        require(
            self.end_lr is None or self.end_lr >= 0, "schedule.end_lr", self.end_lr, "must not be negative", "or null"
        )
        require(
            self.end_lr is None or not self.min_lr_ratio,
            "schedule.end_lr",
            self.end_lr,
            f"cannot be combined with schedule.min_lr_ratio={self.min_lr_ratio}",
            "keep one of the two",
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


@dataclass(kw_only=True)
class StepConfig(ScheduleConfig):
    """times gamma at each of `epochs` (counted from the first step, warm-up included)."""

    kind: str = "step"
    epochs: list[float] = field(default_factory=lambda: [30.0, 60.0, 80.0])
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.epochs == sorted(self.epochs) and all(e > 0 for e in self.epochs),
            "schedule.epochs",
            self.epochs,
            "must be positive and rising",
            "e.g. [30,60,80]",
        )
        require(0 < self.gamma <= 1, "schedule.gamma", self.gamma, "must be in (0, 1]", "0.1 is usual")
