"""Optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import MISSING, require


@dataclass(kw_only=True)
class OptimConfig:
    """Base of every optimizer. lr is the peak learning rate the schedule scales."""

    kind: str = MISSING
    lr: float = 2e-5
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "must be positive", "e.g. optim.lr=2e-5")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative", "0 is off")


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
