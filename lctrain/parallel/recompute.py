"""What of a decoder layer is kept from its forward to its backward pass.

| memory.recompute | kept a layer | run again |
|---|---|---|
| none | everything | nothing |
| selective | input, attention output and log-sum-exp | all but attention |
| full | input | all |
| offload | input, in host memory | all |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lctrain.config.memory import MemoryConfig, Recompute
from lctrain.errors import ModelError
from lctrain.ops.attention.keep import Kept
from lctrain.parallel.offload import HostInputs


def apply_recompute(layers: Sequence[nn.Module], memory: MemoryConfig) -> None:
    """Replace the layers' bound forwards by ones that keep what `memory` says.

    Modules are not wrapped, so parameter names do not change, and FSDP2's hooks stay outside: a layer is
    gathered once for its recomputation and its backward. Raises ModelError when there is no MLP to tile.
    """
    host = HostInputs() if memory.recompute is Recompute.offload else None
    for layer in layers:
        assert not vars(layer).get("lctrain_recomputed"), "a layer must be wrapped once"
        if memory.tiled_mlp is not None:
            _tile_mlp(layer, memory.tiled_mlp)
        if memory.recompute is not Recompute.none:
            layer.forward = _recomputed(layer.forward, memory.recompute, host)
        vars(layer)["lctrain_recomputed"] = True


def _recomputed(forward: Callable[..., Any], kind: Recompute, host: HostInputs | None) -> Callable[..., Any]:
    if kind is Recompute.selective:
        return partial(checkpoint, forward, use_reentrant=False, context_fn=_keep_attention)
    again = partial(checkpoint, forward, use_reentrant=False)
    if host is None:
        return again

    def offloaded(states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with host.moved(states):
            return again(states, *args, **kwargs)

    return offloaded


def _keep_attention() -> tuple[Any, Any]:
    keeper = Kept()
    return keeper.recording(), keeper.replaying()


def _tile_mlp(layer: nn.Module, tiles: int) -> None:
    """Run the layer's MLP on `tiles` runs of columns, each recomputed in the backward.

    Gradients of its weights add up on the rank as for any weight used several times; the layer is what
    FSDP2 reduces, so they cross ranks once. The number of tiles is the configuration's, equal on all ranks.
    """
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, nn.Module):
        raise ModelError(f"memory.tiled_mlp={tiles}: {type(layer).__name__} has no `mlp` to tile; set it to null")
    whole = mlp.forward

    def tiled(states_BSC: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return torch.cat([whole(part) for part in states_BSC.chunk(tiles, dim=1)], dim=1)
        parts = [checkpoint(whole, part, use_reentrant=False) for part in states_BSC.chunk(tiles, dim=1)]
        return torch.cat(parts, dim=1)

    mlp.forward = tiled
