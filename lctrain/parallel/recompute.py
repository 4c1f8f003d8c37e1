"""Activation recomputation of whole layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's inputs; its forward runs again in the backward pass.

    The bound forward is replaced instead of wrapping the module, so parameter names do not change, and
    FSDP2's hooks stay outside: the layer is gathered once for the recomputation and its backward.
    """
    for layer in layers:
        assert not getattr(layer, "lctrain_recomputed", False), "a layer must be wrapped once"
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        layer.lctrain_recomputed = True
