"""Which parameters decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lctrain.ops.shards import full_shape

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Group:
    """Named parameters that share a weight decay. layerwise: they are weights, which LARS gives a rate each."""

    label: str
    weight_decay: float
    named: tuple[tuple[str, nn.Parameter], ...]
    layerwise: bool

    def describe(self) -> str:
        """One line for the log: how many tensors and numbers, and their decay."""
        size = sum(full_shape(p).numel() for _, p in self.named)
        return f"{self.label}: {len(self.named)} tensors, {size:,} parameters, weight decay {self.weight_decay:g}"


def split_groups(model: nn.Module, weight_decay: float, *, decay_all: bool = False) -> list[Group]:
    """Weights of two dimensions or more decay; norms' and biases do not, unless decay_all.

    Norms are told by module type as well as by shape, so that a norm with a matrix weight is caught.
    """
    no_decay_ids = {id(p) for module in model.modules() if _is_norm(module) for p in module.parameters(recurse=False)}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decay = tuple((n, p) for n, p in named if len(full_shape(p)) >= 2 and id(p) not in no_decay_ids)
    chosen = {n for n, _ in decay}
    rest = tuple((n, p) for n, p in named if n not in chosen)
    groups = [
        Group("weights" if decay_all else "decayed", weight_decay, decay, layerwise=True),
        Group("norms and biases", weight_decay if decay_all else 0.0, rest, layerwise=False),
    ]
    return [g for g in groups if g.named]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__
