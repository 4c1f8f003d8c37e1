"""The optimizer of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lctrain.config.optim import AdamWConfig, LarsConfig, OptimConfig, SgdConfig
from lctrain.optim.groups import Group, split_groups

if TYPE_CHECKING:
    import torch
    from torch import nn


def optimizer_groups(config: OptimConfig, model: nn.Module) -> list[Group]:
    """The parameters of `model` by what `config` does to them."""
    decay_all = isinstance(config, SgdConfig) and config.decay_norms_and_biases
    return split_groups(model, config.weight_decay, decay_all=decay_all)


def build_optimizer(config: OptimConfig, groups: list[Group], *, peak_lr: float | None = None) -> torch.optim.Optimizer:
    """An optimizer over `groups`; the trainer sets each group's lr before every step.

    peak_lr: the schedule's largest rate where it is not config.lr.
    """
    import torch

    params = [{"params": [p for _, p in g.named], "weight_decay": g.weight_decay} for g in groups]
    lr = config.lr if peak_lr is None else peak_lr
    # One fused kernel a tensor list on every device we support: no temporaries of parameter size.
    match config:
        case AdamWConfig():
            return torch.optim.AdamW(params, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
        case SgdConfig():
            from torch.distributed.tensor import DTensor

            # torch has no fused SGD for sharded tensors.
            fused = not any(isinstance(p, DTensor) for g in groups for _, p in g.named)
            return torch.optim.SGD(params, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        case LarsConfig():
            from lctrain.optim.lars import Lars

            for param, group in zip(params, groups, strict=True):
                param["layerwise"] = group.layerwise
            return Lars(params, lr=lr, momentum=config.momentum, trust=config.trust, form=config.form, eps=config.eps)
    raise AssertionError(type(config))


def optimizer_signature(config: OptimConfig) -> dict[str, str]:
    """What must agree for the optimizer state of a checkpoint to mean the same here."""
    signature = {"optim": config.kind}
    return signature | {"optim.form": config.form.name} if isinstance(config, LarsConfig) else signature
