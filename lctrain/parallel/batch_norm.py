"""One set of BatchNorm running statistics from every rank's own, in one flat all-reduce.

Pooling, with n values behind rank r's mean mu and (Bessel-corrected) variance v:

    mu = sum(n mu) / N;  var = (sum(n (v (n - 1) / n + mu^2)) / N - mu^2) N / (N - 1)

which is the mean and variance of all ranks' values together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lctrain.config.batch_norm import BnSync


class BatchNormStatistics:
    """Watches the BatchNorm layers of a model and makes their running statistics agree.

    It counts the values (images x height x width) each layer normalised last, which pooling weighs ranks by.
    """

    def __init__(self, model: nn.Module, how: BnSync) -> None:
        self._model, self._how = model, how
        self._layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        self._values = [0] * len(self._layers)
        for place, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._counter(place))

    def synchronise(self, batches: Callable[[], Iterable[Any]], run: Callable[[Any], object]) -> None:
        """Make running statistics agree. A collective over all ranks, unless there is one or nothing to do.

        batches: training micro-batches, for `precise`. run: a forward pass over one.
        """
        if not self._layers:
            return
        if self._how is BnSync.precise:
            self._recompute(batches(), run)
        elif self._how is not BnSync.none and dist.is_initialized() and dist.get_world_size() > 1:
            self._agree()

    def _counter(self, place: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def count(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if layer.training:
                x = inputs[0]
                self._values[place] = x.numel() // x.shape[1]

        return count

    def _agree(self) -> None:
        sizes = [layer.num_features for layer in self._layers]
        mean, var = self._flat()
        match self._how:
            case BnSync.pooled:
                n = self._each(self._values, sizes, mean.device)
                mean, var = _finish(_reduce(_moments(mean, var, n)))
            case BnSync.mean:
                both = _reduce(torch.stack([mean, var])) / dist.get_world_size()
                mean, var = both[0], both[1]
            case BnSync.broadcast:
                both = torch.stack([mean, var])
                dist.broadcast(both, src=0)  # axes: all
                mean, var = both[0], both[1]
        self._write(mean, var)

    @torch.no_grad()
    def _recompute(self, batches: Iterable[Any], run: Callable[[Any], object]) -> None:
        """Statistics of many batches under the current weights (Wu & Johnson 2021, arXiv:2105.07576, section 3)."""
        kept = [(layer.momentum, layer.num_batches_tracked.clone()) for layer in self._layers]  # type: ignore[union-attr]
        sizes = [layer.num_features for layer in self._layers]
        training, total = self._model.training, None
        self._model.train()
        for layer in self._layers:
            layer.momentum = 1.0  # running statistics are then those of the last batch
        for batch in batches:
            run(batch)
            mean, var = self._flat()
            moments = _moments(mean, var, self._each(self._values, sizes, mean.device))
            total = moments if total is None else total + moments
        for layer, (momentum, tracked) in zip(self._layers, kept, strict=True):
            layer.momentum = momentum
            layer.num_batches_tracked.copy_(tracked)  # type: ignore[union-attr]
        self._model.train(training)
        assert total is not None, "no batches to recompute statistics from"
        self._write(*_finish(_reduce(total)))

    def _flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All running means and all running variances, [channels of all layers], fp64."""
        mean = torch.cat([layer.running_mean for layer in self._layers])  # type: ignore[misc]
        var = torch.cat([layer.running_var for layer in self._layers])  # type: ignore[misc]
        return mean.double(), var.double()

    @staticmethod
    def _each(values: list[int], sizes: list[int], device: torch.device) -> torch.Tensor:
        """A number a layer, repeated for its channels."""
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), torch.tensor(sizes)).to(device)

    def _write(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        sizes = [layer.num_features for layer in self._layers]
        for layer, m, v in zip(self._layers, mean.split(sizes), var.split(sizes), strict=True):
            layer.running_mean.copy_(m)  # type: ignore[union-attr]
            layer.running_var.copy_(v)  # type: ignore[union-attr]


def _moments(mean: torch.Tensor, var: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """n, n E[x], n E[x^2]: [3, channels], which ranks (and batches) can add. Nothing normalised counts for nothing."""
    population = var * (n - 1).clamp(min=0) / n.clamp(min=1)
    return torch.stack([n, n * mean, n * (population + mean.square())])


def _finish(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, first, second = moments
    mean = first / n
    var = (second / n - mean.square()).clamp(min=0)
    return mean, var * n / (n - 1).clamp(min=1)


def _reduce(values: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks (axes: all)."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
