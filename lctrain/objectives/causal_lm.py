"""Next-token prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lctrain.objectives.base import Work
from lctrain.ops.attention.documents import Documents
from lctrain.ops.text_batch import TextBatch
from lctrain.parallel.sequence import split_batch
from lctrain.runtime.mesh import Mesh

if TYPE_CHECKING:
    import torch


class CausalLMObjective:
    """Sum of cross entropies over tokens that carry loss; count is the number of such tokens."""

    unit = "tokens"

    def __init__(self, mesh: Mesh, flops: Callable[[Documents], float]) -> None:
        self._mesh = mesh
        self._flops = flops

    def work(self, batch: TextBatch) -> Work:
        """Counted on the unsplit batch, so that every layout divides by the same number."""
        return Work(count=batch.count, units=batch.tokens, flops=self._flops(batch.documents))

    def shard(self, batch: TextBatch) -> TextBatch:
        """This rank's columns [B, S / (cp * sp)], on its device."""
        mesh = self._mesh
        part = split_batch(batch, mesh.sp_rank, mesh.sizes.sp, cp_rank=mesh.cp_rank, cp_size=mesh.sizes.cp)
        return part.to(mesh.device.torch_device)

    def loss_sum(self, model: Any, batch: TextBatch) -> torch.Tensor:
        """Cross entropy summed over this rank's tokens."""
        return model(batch.input_ids, batch.position_ids, batch.labels, batch.documents)

    def eval_sums(self, model: Any, batch: TextBatch) -> torch.Tensor:
        """[1]: cross entropy."""
        return self.loss_sum(model, batch).float()[None]

    def eval_metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Mean loss and perplexity."""
        loss = sums[0] / max(count, 1.0)
        return {"eval_loss": loss, "eval_perplexity": math.exp(loss) if loss < 700 else math.inf}
