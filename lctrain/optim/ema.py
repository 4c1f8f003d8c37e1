"""An exponential moving average of weights and BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Ema:
    """average <- d average + (1 - d) current, with d = min(decay, (1 + t) / (10 + t)) after update t.

    The ramp keeps the first weights from lasting; it is a function of the step alone, so resuming needs no counter.
    Shards of parameters are averaged where they lie.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self.tensors = {name: t.detach().clone() for name, t in _state(module)}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step` (from 1)."""
        keep = min(self._decay, (1 + step) / (10 + step))
        for name, current in _state(self._module):
            average = self.tensors[name]
            if average.is_floating_point():
                _local(average).lerp_(_local(current), 1.0 - keep)
            else:
                average.copy_(current)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The module computes with the averages inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                # After a forward pass without a backward the root's parameters are still whole.
                part.reshard()
        for name, current in _state(self._module):
            mine, theirs = _local(self.tensors[name]), _local(current)
            held = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(held)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
