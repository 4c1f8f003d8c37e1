"""Attention outputs kept across recomputation: computed in the forward pass, replayed in the backward.

Attention is what costs most to run again at long context and least to keep. A layer that is recomputed
runs its forward twice; inside `Kept`'s two contexts the second run gets the first one's outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]


class Kept:
    """Outputs of the attention calls of one layer and one forward pass, in call order."""

    def __init__(self) -> None:
        self._outputs: deque[Outputs] = deque()
        self._replaying = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the first run."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around the recomputation."""
        token = _current.set(self)
        self._replaying = True
        try:
            yield
        finally:
            _current.reset(token)

    def outputs(self, compute: Callable[[], Outputs]) -> Outputs:
        """What `compute` returned the first time. Detached: they are autograd's raw outputs, not graph nodes."""
        if self._replaying:
            out, lse = self._outputs.popleft()
            return out.detach(), lse.detach()
        out, lse = compute()
        self._outputs.append((out.detach(), lse.detach()))
        return out, lse


_current: ContextVar[Kept | None] = ContextVar("kept", default=None)


def kept(compute: Callable[[], Outputs]) -> Outputs:
    """compute(), or its earlier result when the surrounding layer is being recomputed and keeps attention."""
    keeper = _current.get()
    return compute() if keeper is None else keeper.outputs(compute)
