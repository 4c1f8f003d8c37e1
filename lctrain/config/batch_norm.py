"""What happens to the statistics of BatchNorm layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lctrain.config.checks import require


class BnStatistics(Enum):
    """What a training step normalises over: this rank's micro-batch, all ranks' (SyncBN), or parts of it."""

    local = "local"
    sync = "sync"
    ghost = "ghost"


class BnSync(Enum):
    """How running statistics of ranks become one, before each evaluation and each checkpoint."""

    pooled = "pooled"
    mean = "mean"
    precise = "precise"
    broadcast = "broadcast"
    none = "none"


@dataclass(kw_only=True)
class BatchNormConfig:
    """BatchNorm layers of image models.

    statistics: what a step normalises over. ghost_size: images of one ghost batch.
    sync: pooled gives the mean and variance of all ranks' images together; mean averages both (MLPerf's way);
    precise recomputes them over precise_batches training micro-batches of every rank with the current weights;
    broadcast takes the first rank's; none leaves every rank its own.
    momentum: weight of a new batch in the running statistics (torch's convention). momentum_per: the images a rank
    normalises at once for which that momentum is meant; with larger batches it becomes 1 - (1 - momentum) ** k,
    k times as many images being k of the smaller updates. null keeps it.
    """

    statistics: BnStatistics = BnStatistics.local
    ghost_size: int | None = None
    sync: BnSync = BnSync.pooled
    precise_batches: int = 50
    momentum: float = 0.1
    momentum_per: int | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require(
            (self.ghost_size is not None) == (self.statistics is BnStatistics.ghost),
            "bn.ghost_size",
            self.ghost_size,
            f"does not fit bn.statistics={self.statistics.name}",
            "give both bn.statistics=ghost and bn.ghost_size=N, or neither",
        )
        require(
            self.ghost_size is None or self.ghost_size >= 2,
            "bn.ghost_size",
            self.ghost_size,
            "must be at least 2 images",
            "one image has no variance; 32 is a usual value",
        )
        require(
            self.precise_batches >= 1,
            "bn.precise_batches",
            self.precise_batches,
            "must be at least 1",
            "50 is a usual value",
        )
        require(0 < self.momentum <= 1, "bn.momentum", self.momentum, "must be in (0, 1]", "0.1 is a usual value")
        require(
            self.momentum_per is None or self.momentum_per >= 1,
            "bn.momentum_per",
            self.momentum_per,
            "must be at least 1 image",
            "e.g. 32, or null to keep bn.momentum as it is",
        )
        require(self.eps > 0, "bn.eps", self.eps, "must be positive", "1e-5 is a usual value")

    def tuned_momentum(self, images: int) -> float:
        """The momentum for layers that normalise `images` images at once."""
        if self.momentum_per is None:
            return self.momentum
        return 1.0 - (1.0 - self.momentum) ** (images / self.momentum_per)
