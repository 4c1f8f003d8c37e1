"""What the plan verb is asked, and what it assumes of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from lctrain.config.checks import require


class PlannedLength(Enum):
    """auto: the longest sequence that fits."""

    auto = "auto"


@dataclass(kw_only=True)
class PlanConfig:
    """device: a name of conf/hardware/; null is the machine at hand. world_size: ranks; null is the launch's.

    layouts: `all`, or a list of layouts, to compare with every kind of recomputation. max_length=auto: search the
    longest sequence that fits. fit: search the fewest changes that make the job fit. calibrate: run the job's first
    steps here and compare. dataset_size: tokens (or images) of one epoch, for the days it takes. price_per_hour: of one
    device. at_start: train says the plan when it starts, and compares after its first steps.

    Over the device's own numbers: usable_gib, peak_tflops (in the compute dtype), bandwidth_tb_s, link_gb_s (each way),
    latency_us. Of the reachable peak, matmul_efficiency, attention_efficiency, memory_efficiency and
    link_efficiency are what a step is taken to get, and overlap the share of computation that messages hide behind.
    """

    kind: str = "plan"
    device: str | None = None
    world_size: int | None = None
    layouts: Any = None
    max_length: PlannedLength | None = None
    fit: bool = False
    calibrate: bool = False
    dataset_size: float | None = None
    price_per_hour: float | None = None
    at_start: bool = True
    usable_gib: float | None = None
    peak_tflops: float | None = None
    bandwidth_tb_s: float | None = None
    link_gb_s: float | None = None
    latency_us: float | None = None
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.7
    link_efficiency: float = 0.7
    overlap: float = 0.9

    def __post_init__(self) -> None:
        for name in ("world_size", "dataset_size", "usable_gib", "peak_tflops", "bandwidth_tb_s", "link_gb_s"):
            value = getattr(self, name)
            require(
                value is None or value > 0, f"plan.{name}", value, "must be positive", "leave it out for the default"
            )
        for name in ("price_per_hour", "latency_us"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"plan.{name}", value, "must not be negative", "leave it out")
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency"):
            value = getattr(self, name)
            require(0 < value <= 1, f"plan.{name}", value, "must be in (0, 1]", "it is a share of the device's peak")
        require(0 <= self.overlap <= 1, "plan.overlap", self.overlap, "must be in [0, 1]", "0 hides no message")
        names = self.layouts
        require(
            names is None or names == "all" or (isinstance(names, list) and bool(names)),
            "plan.layouts",
            names,
            "must be all or a list",
            "e.g. plan.layouts=all or plan.layouts=[ddp,fsdp,fsdp_sp]",
        )
        asked = [n for n, on in (("layouts", names), ("max_length", self.max_length), ("fit", self.fit),
                                 ("calibrate", self.calibrate)) if on]  # fmt: skip
        require(
            len(asked) <= 1,
            "plan." + (asked[1] if len(asked) > 1 else ""),
            getattr(self, asked[1]) if len(asked) > 1 else None,
            f"cannot be combined with plan.{asked[0] if asked else ''}",
            "ask one question at a time",
        )
