"""Ghost batches and momentum; SyncBN over ranks is in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lctrain.config.batch_norm import BatchNormConfig, BnStatistics
from lctrain.models.batch_norm import GhostBatchNorm2d, SyncBatchNorm2d, configure_batch_norm, has_batch_norm


def net() -> nn.Sequential:
    """One layer of each kind that matters."""
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))


def test_ghost_batches_are_normalised_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 2, 2)
    model, plain = nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
    configure_batch_norm(model, BatchNormConfig(statistics=BnStatistics.ghost, ghost_size=2), images=6, group=None)
    expected = torch.cat([plain(part) for part in x.split(2)])
    assert isinstance(model[0], GhostBatchNorm2d)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(model[0].running_var, plain.running_var, rtol=0, atol=0)
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


def test_momentum_keeps_its_span_of_images() -> None:
    config = BatchNormConfig(momentum=0.1, momentum_per=32)
    assert config.tuned_momentum(32) == pytest.approx(0.1)
    assert config.tuned_momentum(64) == pytest.approx(1 - 0.9**2)
    assert BatchNormConfig(momentum=0.1).tuned_momentum(4096) == 0.1
    model = net()
    assert configure_batch_norm(model, config, images=64, group=None) == pytest.approx(0.19)
    assert model[1].momentum == pytest.approx(0.19)
    ghost = BatchNormConfig(momentum_per=32, statistics=BnStatistics.ghost, ghost_size=32)
    assert configure_batch_norm(net(), ghost, images=64, group=None) == pytest.approx(0.1)


def test_names_and_tensors_survive_the_change_of_class() -> None:
    model = net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    configure_batch_norm(model, BatchNormConfig(statistics=BnStatistics.sync, eps=1e-3), images=4, group=None)
    assert isinstance(model[1], SyncBatchNorm2d)
    assert model[1].eps == 1e-3
    assert before.keys() == model.state_dict().keys()
    assert has_batch_norm(model)
    assert not has_batch_norm(nn.Conv2d(1, 1, 1))
