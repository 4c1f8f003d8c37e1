"""What is recomputed instead of kept, and the budget of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lctrain.config.checks import require


class Recompute(Enum):
    """Which activations are recomputed in the backward pass."""

    none = "none"
    selective = "selective"
    full = "full"
    offload = "offload"


@dataclass(kw_only=True)
class MemoryConfig:
    """recompute: none keeps everything, selective each decoder layer's input and attention output, full its
    input only, offload its input in host memory.

    loss_chunk_mb: fp32 logits of one loss chunk, in MiB; whole logits are never built.
    tiled_mlp: run each MLP on this many runs of columns, one after another; null is off.
    """

    kind: str = "memory"
    recompute: Recompute = Recompute.none
    loss_chunk_mb: int = 256
    tiled_mlp: int | None = None

    def __post_init__(self) -> None:
        require(
            self.loss_chunk_mb >= 1,
            "memory.loss_chunk_mb",
            self.loss_chunk_mb,
            "must be at least 1 MiB",
            "256 is a good value; smaller saves memory, larger launches fewer kernels",
        )
        require(
            self.tiled_mlp is None or self.tiled_mlp >= 2,
            "memory.tiled_mlp",
            self.tiled_mlp,
            "must be at least 2 tiles",
            "or null to run each MLP whole",
        )
