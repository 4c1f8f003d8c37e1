"""Optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lctrain.config.checks import MISSING, require


@dataclass(kw_only=True)
class OptimConfig:
    """Base of every optimizer. lr is the peak learning rate the schedule scales.

    base_lr_per: lr is meant for a global batch of so many, and the peak is lr * global batch / base_lr_per (linear
    scaling, Goyal et al. 2017, arXiv:1706.02677); null takes lr as it is.
    tuned_for_batch: the global batch these numbers were found for; another one is warned about. null: any.
    """

    kind: str = MISSING
    lr: float = 2e-5
    weight_decay: float = 0.0
    base_lr_per: int | None = None
    tuned_for_batch: int | None = None

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "must be positive", "e.g. optim.lr=2e-5")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative", "0 is off")
        for name in ("base_lr_per", "tuned_for_batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"optim.{name}", value, "must be at least 1", "or null")

    def peak_lr(self, global_batch_size: int) -> float:
        """The rate after warm-up: lr, or scaled linearly with the batch."""
        return self.lr if self.base_lr_per is None else self.lr * global_batch_size / self.base_lr_per


@dataclass(kw_only=True)
class AdamWConfig(OptimConfig):
    """AdamW (Loshchilov & Hutter 2019); norms and biases are not decayed."""

    kind: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}", value, "must be in [0, 1)", "e.g. 0.9 and 0.95")
        require(self.eps > 0, "optim.eps", self.eps, "must be positive", "e.g. optim.eps=1e-8")


@dataclass(kw_only=True)
class SgdConfig(OptimConfig):
    """SGD with momentum; norms and biases are not decayed unless decay_norms_and_biases."""

    kind: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = False
    decay_norms_and_biases: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "must be in [0, 1)", "e.g. 0.9")
        require(
            not self.nesterov or self.momentum > 0, "optim.nesterov", True, "needs momentum", "set optim.momentum=0.9"
        )


class LarsForm(Enum):
    """Which published LARS; they are different optimizers.

    paper: the learning rate inside the momentum (You et al. 2017, arXiv:1708.03888; MLPerf). momentum_corrected:
    paper with the momentum times the ratio of this step's and the last step's rate (NVIDIA's MLPerf v2.0).
    lr_outside: the learning rate outside the momentum (timm, torchlars). nesterov: lr_outside with Nesterov's step.
    clipped: lr_outside with the trust ratio at most 1 (apex LARC). fujitsu: MLPerf v0.6, decay scaled with the rate.
    """

    paper = "paper"
    momentum_corrected = "momentum_corrected"
    lr_outside = "lr_outside"
    nesterov = "nesterov"
    clipped = "clipped"
    fujitsu = "fujitsu"


@dataclass(kw_only=True)
class LarsConfig(OptimConfig):
    """LARS: layer-wise rates by the ratio of weight and gradient norms; norms and biases are plain SGD, not decayed.

    trust: eta of the trust ratio. eps: added to the ratio's denominator; null takes the form's own.
    """

    kind: str = "lars"
    lr: float = 10.0
    weight_decay: float = 2e-4
    momentum: float = 0.9
    trust: float = 0.001
    eps: float | None = None
    form: LarsForm = LarsForm.paper

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "must be in [0, 1)", "e.g. 0.9")
        require(self.trust > 0, "optim.trust", self.trust, "must be positive", "0.001 is MLPerf's value")
        require(self.eps is None or self.eps >= 0, "optim.eps", self.eps, "must not be negative", "0 is MLPerf's value")
