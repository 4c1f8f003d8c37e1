"""Classification of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lctrain.config.classification import ClassificationConfig
from lctrain.objectives.base import Work
from lctrain.ops.image_batch import IGNORE, ImageBatch
from lctrain.runtime.mesh import Mesh


class ClassificationObjective:
    """Sum of cross entropies over images; count is the number of images.

    mean, std: of each channel in [0, 1]. flops: of one image, forward and backward.
    """

    unit = "samples"

    def __init__(
        self, mesh: Mesh, config: ClassificationConfig, *, mean: Sequence[float], std: Sequence[float], flops: float
    ) -> None:
        self._mesh, self._config, self._flops = mesh, config, flops
        device = mesh.device.torch_device
        scale = 1.0 / (255.0 * torch.tensor(std, device=device))
        self._scale = scale[:, None, None]
        self._shift = (-torch.tensor(mean, device=device) / torch.tensor(std, device=device))[:, None, None]

    def work(self, batch: ImageBatch) -> Work:
        """Images that are there."""
        return Work(count=batch.count, units=batch.count, flops=batch.count * self._flops)

    def shard(self, batch: ImageBatch) -> ImageBatch:
        """The batch on this rank's device, still uint8: a quarter of the bytes of floats."""
        return batch.to(self._mesh.device.torch_device)

    def loss_sum(self, model: Any, batch: ImageBatch) -> torch.Tensor:
        """Cross entropy of smoothed (and mixed) labels, summed over this rank's images."""
        images, labels = self.normalise(batch.images), batch.labels
        if self._config.mixup == 0:
            return self._cross_entropy(model(images), labels)
        # One share for the micro-batch, from the step's generator; partners are taken from the other end.
        share = torch.distributions.Beta(self._config.mixup, self._config.mixup).sample().to(images.device)
        logits = model(share * images + (1 - share) * images.flip(0))
        return share * self._cross_entropy(logits, labels) + (1 - share) * self._cross_entropy(logits, labels.flip(0))

    def eval_sums(self, model: Any, batch: ImageBatch) -> torch.Tensor:
        """[3]: cross entropy without smoothing, images whose class is the first guess, and among the first five."""
        logits, labels = model(self.normalise(batch.images)).float(), batch.labels
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        guesses = logits.topk(min(5, logits.shape[-1])).indices == labels[:, None]
        return torch.stack([loss, guesses[:, 0].sum(), guesses.sum()]).float()

    def eval_metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Mean loss, top-1 and top-5 accuracy as fractions."""
        loss, first, five = (value / max(count, 1.0) for value in sums)
        return {"eval_loss": loss, "top1": first, "top5": five}

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [B, H, W, C] to fp32 [B, C, H, W], channels last in memory, without a copy of the bytes."""
        return images.permute(0, 3, 1, 2) * self._scale + self._shift

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            logits.float(),
            labels,
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self._config.label_smoothing,
        )
