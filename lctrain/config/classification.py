"""Options of training a classifier."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import require


@dataclass(kw_only=True)
class ClassificationConfig:
    """label_smoothing: probability spread evenly over all classes (Szegedy et al. 2015, arXiv:1512.00567).

    mixup: alpha of the Beta distribution by which pairs of images are mixed (Zhang et al. 2017, arXiv:1710.09412);
    0 is off. ema_decay: keep a moving average of weights and BatchNorm statistics, with this decay a step, and
    evaluate it too; null is off.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.label_smoothing < 1,
            "classification.label_smoothing",
            self.label_smoothing,
            "must be in [0, 1)",
            "0.1 is usual",
        )
        require(self.mixup >= 0, "classification.mixup", self.mixup, "must not be negative", "0 is off, 0.2 is usual")
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            "classification.ema_decay",
            self.ema_decay,
            "must be in (0, 1)",
            "e.g. 0.9999, or null for none",
        )
