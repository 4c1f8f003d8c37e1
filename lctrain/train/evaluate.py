"""Loss on held-out data: every sequence once on any number of ranks, under the training layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from lctrain.engines.base import Engine
from lctrain.objectives.base import Objective
from lctrain.runtime.mesh import Mesh


def evaluate(engine: Engine, objective: Objective, batches: Iterable[Any], mesh: Mesh) -> dict[str, float]:
    """Mean loss and perplexity over `batches`, this data rank's share. A collective over all ranks.

    Every data rank must bring equally many batches (empty ones where the data run out).
    """
    total = torch.zeros((), device=mesh.device.torch_device, dtype=torch.float64)
    count = units = 0.0
    training = engine.module.training
    engine.module.eval()
    # The unwrapped module: DDP's forward would expect a backward.
    with torch.no_grad(), engine.autocast():
        for batch in batches:
            work = objective.work(batch)
            count, units = count + work.count, units + work.units
            total += objective.loss_sum(engine.module, objective.shard(batch))
    engine.module.train(training)
    (count, units), _ = mesh.sum_over_data([count, units])
    loss = float(mesh.sum_losses(total)) / max(count, 1.0)
    return {
        "eval_loss": loss,
        "eval_perplexity": math.exp(loss) if loss < 700 else math.inf,
        f"eval_{objective.unit}": units,
    }
