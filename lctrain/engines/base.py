"""What the trainer asks of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class StepResult:
    """grad_norm: global norm before clipping, of unscaled gradients. skipped: it was not finite."""

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """Runs forward, backward and update of one module under a layout.

    The gradient contract: after the last micro-step, gradients are the sum over micro-batches, data ranks
    and sequence shards of d(loss sum) / global count. Each engine cancels its own averaging.
    """

    @property
    def module(self) -> nn.Module:
        """The bare model, for evaluation."""

    @property
    def model(self) -> nn.Module:
        """What the training forward goes through."""

    def microstep(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward; gradients cross ranks when `last` at the latest."""

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision for a forward outside microstep."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a share of the global mean."""

    def step(self, lr: float) -> StepResult:
        """Unscale, clip, update and zero; every rank skips together when the norm is not finite."""

    def grad_norm(self) -> float:
        """Global norm of the unscaled gradients, before `step`. A collective over all ranks."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, its whole unscaled gradient), before `step`. A collective over all ranks."""

    def scale_state(self) -> dict[str, float]:
        """The loss scale, for the checkpoint."""

    def load_scale_state(self, state: dict[str, float]) -> None:
        """The loss scale, from the checkpoint."""

    def save(self, folder: Path) -> None:
        """Write this rank's shards of trained parameters and optimizer state by name. A collective."""

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what any engine saved. A collective. Raises CheckpointError."""
