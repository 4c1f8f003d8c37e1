"""The moving average by hand, its use and its counters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lctrain.optim.ema import Ema


def test_the_average_by_hand_and_its_use() -> None:
    module = nn.BatchNorm1d(1, affine=True)
    ema = Ema(module, 0.5)
    with torch.no_grad():
        module.weight.fill_(3.0)
        module.running_mean.fill_(2.0)  # type: ignore[union-attr]
        module.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    ema.update(1)  # (1 + 1) / (10 + 1) is less than 0.5
    keep = 2 / 11
    assert ema.tensors["weight"].item() == pytest.approx(keep * 1 + (1 - keep) * 3)
    ema.update(1000)
    assert ema.tensors["weight"].item() == pytest.approx(0.5 * (keep * 1 + (1 - keep) * 3) + 0.5 * 3)
    assert ema.tensors["num_batches_tracked"].item() == 7
    average = ema.tensors["running_mean"].item()
    with ema.used():
        assert module.running_mean.item() == pytest.approx(average)  # type: ignore[union-attr]
        assert module.weight.item() != 3.0
    assert module.weight.item() == 3.0
    assert module.running_mean.item() == 2.0  # type: ignore[union-attr]
    assert ema.tensors["running_mean"].item() == pytest.approx(average)
