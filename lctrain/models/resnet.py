"""ResNet v1.5: He et al. 2015 (arXiv:1512.03385), with a bottleneck's stride in its 3x3 convolution.

Module names are torchvision's, so that state dicts are interchangeable.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from lctrain.config.model import ResNetConfig, Stem

if TYPE_CHECKING:
    import torch

_BLOCKS = {
    8: [1, 1, 1],
    18: [2, 2, 2, 2],
    20: [3, 3, 3],
    34: [3, 4, 6, 3],
    50: [3, 4, 6, 3],
    101: [3, 4, 23, 3],
    152: [3, 8, 36, 3],
}
_conv3x3 = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
_conv1x1 = partial(nn.Conv2d, kernel_size=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. [B, inner, H, W] to [B, inner, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, channels: int, inner: int, *, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, inner, stride=stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(inner, inner)
        self.bn2 = nn.BatchNorm2d(inner)
        self.downsample = downsample

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm whose gain closes or opens the residual branch."""
        return self.bn2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual step."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 convolutions beside a shortcut. [B, C, H, W] to [B, 4 inner, H / s, W / s]."""

    expansion = 4

    def __init__(self, channels: int, inner: int, *, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv1x1(channels, inner)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv3x3(inner, inner, stride=stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv1x1(inner, inner * self.expansion)
        self.bn3 = nn.BatchNorm2d(inner * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm whose gain closes or opens the residual branch."""
        return self.bn3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual step."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)


class ResNet(nn.Module):
    """Images [B, C, H, W] to logits [B, classes]."""

    def __init__(self, config: ResNetConfig, *, classes: int, channels: int) -> None:
        super().__init__()
        block = Bottleneck if config.depth >= 50 else BasicBlock
        width = config.width or (16 if config.thin else 64)
        stem = config.stem or (Stem.small if config.thin else Stem.imagenet)
        if stem is Stem.imagenet:
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = _conv3x3(channels, width)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self._width = width
        for i, count in enumerate(_BLOCKS[config.depth]):
            stage = self._stage(block, width * 2**i, count, stride=1 if i == 0 else 2)
            self.add_module(f"layer{i + 1}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self._width, classes)
        self._first_weights(config)

    @property
    def stages(self) -> list[nn.Module]:
        """layer1, layer2, ...: what a layout shards one by one."""
        return [module for name, module in self.named_children() if name.startswith("layer")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))

    def _stage(self, block: type[BasicBlock | Bottleneck], inner: int, count: int, *, stride: int) -> nn.Sequential:
        blocks = []
        for i in range(count):
            step = stride if i == 0 else 1
            out = inner * block.expansion
            downsample = None
            if step != 1 or self._width != out:
                downsample = nn.Sequential(_conv1x1(self._width, out, stride=step), nn.BatchNorm2d(out))
            blocks.append(block(self._width, inner, stride=step, downsample=downsample))
            self._width = out
        return nn.Sequential(*blocks)

    def _first_weights(self, config: ResNetConfig) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if config.zero_init_last_gamma and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_(module.last_norm.weight)
        if config.fc_std is not None:
            nn.init.normal_(self.fc.weight, std=config.fc_std)
            nn.init.zeros_(self.fc.bias)
