"""The arithmetic a person would do: bytes a parameter, over the shards."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.optim import AdamWConfig, SgdConfig
from lctrain.config.parallel import FsdpConfig, ZeroConfig
from lctrain.config.precision import Fp32Config
from lctrain.config.root import TrainConfig
from lctrain.config.sizes import Sizes


@dataclass(frozen=True)
class Hand:
    """Bytes of the whole model's state by kind, the pieces each is cut into, and what is left for a rank."""

    weights: int
    gradients: int
    master_weights: int
    optimizer_state: int
    shards: dict[str, int]
    per_rank: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state


def by_hand(config: TrainConfig, sizes: Sizes, *, parameters: int, trained: int) -> Hand:
    """Mixed precision: 2 bytes of weights, 2 of gradients, 4 of master weights; fp32: 4 and 4; Adam 8, momentum 4.

    DeepSpeed keeps master weights beside fp32 ones too. What an engine really keeps is in the trace.
    """
    width = 4 if isinstance(config.precision, Fp32Config) else 2
    optimizer = 8 if isinstance(config.optim, AdamWConfig) else 4
    if isinstance(config.optim, SgdConfig) and config.optim.momentum == 0:
        optimizer = 0
    totals = {
        "weights": width * parameters,
        "gradients": width * trained,
        "master_weights": 4 * trained if width == 2 or isinstance(config.parallel, ZeroConfig) else 0,
        "optimizer_state": optimizer * trained,
    }
    shards = _shards(config, sizes)
    per_rank = sum(value // shards[name] for name, value in totals.items())
    return Hand(**totals, shards=shards, per_rank=per_rank)


def _shards(config: TrainConfig, sizes: Sizes) -> dict[str, int]:
    """Pieces that each kind of state is cut into."""
    parallel = config.parallel
    if isinstance(parallel, ZeroConfig):
        cut = {"optimizer_state": 1, "master_weights": 1, "gradients": 2, "weights": 3}
        return {name: sizes.world if parallel.stage >= stage else 1 for name, stage in cut.items()}
    pieces = sizes.shards if isinstance(parallel, FsdpConfig) else 1
    return dict.fromkeys(("weights", "gradients", "master_weights", "optimizer_state"), pieces)
