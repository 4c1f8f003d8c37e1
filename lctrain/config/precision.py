"""Compute dtype over fp32 master weights."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import MISSING, require


@dataclass(kw_only=True)
class PrecisionConfig:
    """Base: parameters, gradients across ranks and optimizer state are fp32 in every mode."""

    kind: str = MISSING


@dataclass(kw_only=True)
class Fp32Config(PrecisionConfig):
    """fp32 everywhere."""

    kind: str = "fp32"


@dataclass(kw_only=True)
class Bf16Config(PrecisionConfig):
    """bfloat16 compute."""

    kind: str = "bf16"


@dataclass(kw_only=True)
class Fp16Config(PrecisionConfig):
    """float16 compute with a dynamic loss scale, shared by all ranks.

    The scale halves when a step's gradients overflow (that step is skipped everywhere) and doubles
    after growth_interval good steps.
    """

    kind: str = "fp16"
    initial_scale: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        require(
            self.initial_scale >= 1,
            "precision.initial_scale",
            self.initial_scale,
            "must be at least 1",
            "65536 is a usual start",
        )
        require(
            self.growth_interval >= 1,
            "precision.growth_interval",
            self.growth_interval,
            "must be at least 1",
            "2000 is a usual value",
        )
