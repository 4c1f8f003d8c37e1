"""BatchNorm that normalises over all ranks (SyncBN) or over parts of a batch (ghost batches)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from lctrain.config.batch_norm import BatchNormConfig, BnStatistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Normalises over the images of every rank of `group`; any backend, CPU included.

    Two passes over the activations, mean then centred squares: E[x^2] - mean^2 would cancel in half precision.
    """

    group: ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to the same shape. A collective over the group while training."""
        if not self.training:
            return super().forward(x)
        wide = x.float()
        count = torch.full((1,), wide.numel() / wide.shape[1], device=x.device)
        sums = all_reduce(torch.cat([wide.sum((0, 2, 3)), count]), group=self.group)
        total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        centred = wide - mean[:, None, None]
        var = all_reduce(centred.square().sum((0, 2, 3)), group=self.group) / total
        self._track(mean.detach(), var.detach() * total / (total - 1))
        scale = torch.rsqrt(var + self.eps) * self.weight
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    def _track(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var, self.momentum)


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Normalises runs of `ghost_size` images apart (Hoffer et al. 2017, arXiv:1705.08741).

    Running statistics take one update for each run. A shorter last run is normalised by itself.
    """

    ghost_size = 32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to the same shape."""
        if not self.training or len(x) <= self.ghost_size:
            return super().forward(x)
        parts = [super(GhostBatchNorm2d, self).forward(part) for part in x.split(self.ghost_size)]
        return torch.cat(parts)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any layer keeps running statistics."""
    return any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def configure_batch_norm(
    model: nn.Module, config: BatchNormConfig, *, images: int, group: ProcessGroup | None
) -> float:
    """Set what every BatchNorm layer of `model` does, in place; returns the momentum they got.

    images: what a rank normalises at once without ghost batches or SyncBN. group: the ranks of SyncBN.
    """
    at_once = {
        BnStatistics.local: images,
        BnStatistics.ghost: config.ghost_size or images,
        BnStatistics.sync: images * (dist.get_world_size(group) if dist.is_initialized() else 1),
    }[config.statistics]
    momentum = config.tuned_momentum(at_once)
    for layer in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        layer.eps, layer.momentum = config.eps, momentum
        # A class changed in place keeps parameters, buffers and names what they are.
        if config.statistics is BnStatistics.sync:
            layer.__class__ = SyncBatchNorm2d
            layer.group = group  # type: ignore[assignment]
        elif config.statistics is BnStatistics.ghost:
            layer.__class__ = GhostBatchNorm2d
            layer.ghost_size = config.ghost_size  # type: ignore[assignment]
    return momentum
