"""The batch the classification objective trains on. B images of H x W pixels and C channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE = -100


@dataclass(frozen=True)
class ImageBatch:
    """One micro-batch of one data rank.

    images: [B, H, W, C] uint8, as they were decoded; the device normalises them. labels: [B] int64, IGNORE where a
    place holds no image (its pixels are zero). count: places that hold one; taken from labels when not given, so
    give it where labels are already on an accelerator.
    """

    images: torch.Tensor
    labels: torch.Tensor
    count: int = -1

    def __post_init__(self) -> None:
        if self.count < 0:
            object.__setattr__(self, "count", int((self.labels != IGNORE).sum()))

    def to(self, device: torch.device) -> ImageBatch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            images=self.images.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )
