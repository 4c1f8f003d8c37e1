"""The optimizer of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lctrain.config.optim import AdamWConfig, OptimConfig
from lctrain.optim.groups import Group

if TYPE_CHECKING:
    import torch


def build_optimizer(config: OptimConfig, groups: list[Group]) -> torch.optim.Optimizer:
    """An optimizer over `groups`; the trainer sets each group's lr before every step."""
    import torch

    assert isinstance(config, AdamWConfig), type(config)
    params = [{"params": [p for _, p in g.named], "weight_decay": g.weight_decay} for g in groups]
    # One fused kernel a tensor list on every device we support: no temporaries of parameter size.
    return torch.optim.AdamW(params, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
