"""Held-out data: every sample once on any number of ranks, under the training layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lctrain.engines.base import Engine
from lctrain.objectives.base import Objective
from lctrain.runtime.mesh import Mesh
from lctrain.train.step import host_sum


def evaluate(engine: Engine, objective: Objective, batches: Iterable[Any], mesh: Mesh) -> dict[str, float]:
    """The objective's metrics over `batches`, this data rank's share. A collective over all ranks.

    Every data rank must bring equally many batches (empty ones where the data run out), and at least one.
    """
    sums: list[torch.Tensor] = []
    count = units = 0.0
    training = engine.module.training
    engine.module.eval()
    # The unwrapped module: DDP's forward would expect a backward.
    with torch.no_grad(), engine.autocast():
        for batch in batches:
            work = objective.work(batch)
            count, units = count + work.count, units + work.units
            sums.append(objective.eval_sums(engine.module, objective.shard(batch)))
    engine.module.train(training)
    assert sums, "no batches to evaluate"
    (count, units), _ = mesh.sum_over_data([count, units])
    metrics = objective.eval_metrics(mesh.sum_losses(host_sum(sums)).tolist(), count)
    return metrics | {f"eval_{objective.unit}": units}
