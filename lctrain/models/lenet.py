"""LeNet-5's shape (LeCun et al. 1998) as it is trained today: ReLU and max pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    import torch


class LeNet(nn.Module):
    """Images [B, C, S, S] to logits [B, classes]; S is at least 12 and a multiple of 4."""

    def __init__(self, *, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        side = (image_size // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    @property
    def stages(self) -> list[nn.Module]:
        """What a layout shards one by one: nothing is large enough."""
        return []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        # Channels-last activations flatten in the order of NCHW, as a saved state dict expects.
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))
