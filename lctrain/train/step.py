"""Gradients of one global batch: the inner part of a step, shared by training and verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lctrain.engines.base import Engine
from lctrain.objectives.base import Objective
from lctrain.runtime.mesh import Mesh


@dataclass(frozen=True)
class StepLoss:
    """mean: over the global batch. own: this rank's part of it times the number of ranks: the mean of them is mean."""

    mean: float
    own: float


def host_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of equally shaped fp32 device tensors, in fp64 on the host: one transfer, which waits for all of them."""
    return torch.stack(list(parts)).cpu().double().sum(0)


def forward_backward(engine: Engine, objective: Objective, mesh: Mesh, micro: Sequence[Any], count: float) -> StepLoss:
    """Accumulate the gradients of (sum of losses over the global batch) / count; returns that mean loss.

    micro: this data rank's micro-batches. count: over the whole global batch. A collective over all ranks.
    """
    losses: list[torch.Tensor] = []
    for i, batch in enumerate(micro):
        with engine.microstep(last=i == len(micro) - 1):
            loss_sum = objective.loss_sum(engine.model, objective.shard(batch))
            engine.backward(loss_sum / count)
        losses.append(loss_sum.detach())
    total = host_sum(losses)
    own = float(total) * mesh.sizes.world / mesh.sizes.tp
    return StepLoss(mean=float(mesh.sum_losses(total)) / count, own=own / count)
