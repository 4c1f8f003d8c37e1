"""What is recomputed instead of kept, and the budget of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lctrain.config.checks import require


class Recompute(Enum):
    """Which activations are recomputed in the backward pass."""

    none = "none"
    full = "full"


@dataclass(kw_only=True)
class MemoryConfig:
    """recompute=full keeps only each decoder layer's input.

    loss_chunk_mb: fp32 logits of one loss chunk, in MiB; whole logits are never built.
    """

    kind: str = "memory"
    recompute: Recompute = Recompute.none
    loss_chunk_mb: int = 256

    def __post_init__(self) -> None:
        require(
            self.loss_chunk_mb >= 1,
            "memory.loss_chunk_mb",
            self.loss_chunk_mb,
            "must be at least 1 MiB",
            "256 is a good value; smaller saves memory, larger launches fewer kernels",
        )
