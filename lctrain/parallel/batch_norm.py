"""One set of BatchNorm running statistics from every rank's own, in one flat all-reduce.

Pooling, with n values behind rank r's mean mu and (Bessel-corrected) variance v:

    mu = sum(n mu) / N;  var = (sum(n (v (n - 1) / n + mu^2)) / N - mu^2) N / (N - 1)

which is the mean and variance of all ranks' values together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lctrain.config.batch_norm import BnSync


class BatchNormStatistics:
    """Watches the BatchNorm layers of a model and makes their running statistics agree.

    It counts the values (images x height x width) each layer normalised last, which pooling weighs ranks by. Every
    rank must train between the same two merges, or none.
    """

    def __init__(self, model: nn.Module, how: BnSync) -> None:
        self._model, self._how = model, how
        self._layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        self._sizes = [layer.num_features for layer in self._layers]
        self._values = [0] * len(self._layers)
        for place, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._counter(place))

    def synchronise(
        self,
        batches: Callable[[], Iterable[Any]],
        run: Callable[[Any], object],
        *,
        versions: Sequence[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
    ) -> None:
        """Make running statistics agree. A collective over all ranks, unless there is one or nothing to do.

        batches: training micro-batches, for `precise`. run: a forward pass over one. versions: contexts inside which
        the model has its own weights and statistics, a moving average's, ...: each version's are merged.
        """
        # Pooling what is pooled would count it as single ranks' once more.
        if not any(self._values):
            return
        for version in versions:
            with version():
                if self._how is BnSync.precise:
                    self._recompute(batches(), run)
                elif self._how is not BnSync.none and dist.is_initialized() and dist.get_world_size() > 1:
                    self._agree()
        self._values = [0] * len(self._layers)

    def _counter(self, place: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def count(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if layer.training:
                x = inputs[0]
                self._values[place] = x.numel() // x.shape[1]

        return count

    def _agree(self) -> None:
        buffers = self._buffers()
        both = torch.cat(buffers).cpu().double()  # fp64 is the host's: not every device has it
        match self._how:
            case BnSync.pooled:
                both = _finish(_reduce(self._moments(both)), self._of_channels())
            case BnSync.mean:
                both = _reduce(both) / dist.get_world_size()
            case BnSync.broadcast:
                dist.broadcast(both, src=0)  # axes: all
        self._write(buffers, both)

    @torch.no_grad()
    def _recompute(self, batches: Iterable[Any], run: Callable[[Any], object]) -> None:
        """Statistics of many batches under the current weights (Wu & Johnson 2021, arXiv:2105.07576, section 3).

        They are taken from what layers are given: a layer of ghost batches keeps those of the last one only.
        """
        counters = [layer.num_batches_tracked for layer in self._layers]
        kept = [counter.clone() for counter in counters]  # type: ignore[union-attr]
        buffers = self._buffers()
        sums = [torch.zeros(2, size, dtype=torch.float64) for size in self._sizes]
        counts = [0.0] * len(self._layers)

        def adder(place: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
            def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                x = inputs[0].float()
                var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
                n = x.numel() // x.shape[1]
                counts[place] += n
                sums[place] += n * torch.stack([mean, var + mean.square()]).cpu()

            return add

        hooks = [layer.register_forward_pre_hook(adder(place)) for place, layer in enumerate(self._layers)]
        training = self._model.training
        self._model.train()
        for batch in batches:
            run(batch)
        self._model.train(training)
        for hook in hooks:
            hook.remove()
        for counter, before in zip(counters, kept, strict=True):
            counter.copy_(before)  # type: ignore[union-attr]
        total = torch.cat([*torch.cat(sums, 1), torch.tensor(counts, dtype=torch.float64)])
        self._write(buffers, _finish(_reduce(total), self._of_channels()))

    def _buffers(self) -> list[torch.Tensor]:
        """Every layer's running mean, then every layer's running variance."""
        found = [layer._buffers for layer in self._layers]
        return [b["running_mean"] for b in found] + [b["running_var"] for b in found]  # type: ignore[return-value]

    def _of_channels(self) -> torch.Tensor:
        """The layer that each channel belongs to."""
        layers = torch.arange(len(self._sizes))
        return torch.repeat_interleave(layers, torch.tensor(self._sizes), output_size=sum(self._sizes))

    def _moments(self, both: torch.Tensor) -> torch.Tensor:
        """n E[x] and n E[x^2] of each channel, then n of each layer: one vector, which ranks can add."""
        mean, var = both.chunk(2)
        counts = torch.tensor(self._values, dtype=torch.float64)
        n = counts[self._of_channels()]
        moments = both.new_empty(len(both) + len(counts))
        # In place: fresh memory costs more than these products.
        first, second, last = moments.split([len(mean), len(mean), len(counts)])
        torch.mul(n, mean, out=first)
        torch.mul(first, mean, out=second)
        second.addcmul_(n.sub_(1), var)
        last.copy_(counts)
        return moments

    def _write(self, buffers: list[torch.Tensor], both: torch.Tensor) -> None:
        torch._foreach_copy_(buffers, both.float().split(self._sizes * 2))


def _finish(moments: torch.Tensor, of_channels: torch.Tensor) -> torch.Tensor:
    """Means, then unbiased variances, of added moments, in their place. of_channels: the layer of each channel."""
    channels = len(of_channels)
    n = moments[2 * channels :][of_channels]
    first, second = moments[:channels], moments[channels : 2 * channels]
    second.addcmul_(first, first / n, value=-1)
    first.div_(n)
    second.div_(n.sub_(1).clamp_(min=1)).clamp_(min=0)
    return moments[: 2 * channels]


def _reduce(values: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks (axes: all)."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
