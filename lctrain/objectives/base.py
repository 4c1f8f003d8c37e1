"""What an objective owes the trainer: a sum and a count, divided once, by the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Work:
    """What a micro-batch counts for, as host numbers that can be summed over data ranks.

    count: what the loss sum is divided by. units: tokens or samples seen. flops: model FLOPs of
    forward and backward without recomputation.
    """

    count: float
    units: float
    flops: float


class Objective(Protocol):
    """Where the two regimes meet."""

    unit: str

    def work(self, batch: Any) -> Work:
        """Count, units and FLOPs of an unsplit batch."""

    def shard(self, batch: Any) -> Any:
        """The part of the batch this rank computes, on its device."""

    def loss_sum(self, model: Any, batch: Any) -> torch.Tensor:
        """Sum of this rank's losses, fp32 scalar [], connected to the graph even when nothing counts."""

    def eval_sums(self, model: Any, batch: Any) -> torch.Tensor:
        """[K] sums over this rank's part of a validation batch."""

    def eval_metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """What a validation reports, from those sums over all ranks and batches, and the count of the whole."""
