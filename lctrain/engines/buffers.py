"""What a forward changes besides gradients, taken back when its step is skipped."""

from __future__ import annotations

import torch
from torch import nn


class KeptBuffers:
    """The buffers of `module` as `keep` found them: BatchNorm's running statistics, which no optimizer guards.

    A forward that overflows leaves infinities in them. Skipping the update does not help: they stay for good.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember what they hold."""
        self._kept = [buffer.clone() for buffer in self._module.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Give them what `keep` found."""
        for kept, live in zip(self._kept, self._module.buffers(), strict=True):
            live.copy_(kept)
