"""BatchNorm over two ranks: one set of running statistics every way there is, and SyncBN's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lctrain.config.batch_norm import BatchNormConfig, BnStatistics, BnSync
from lctrain.models.batch_norm import configure_batch_norm
from lctrain.parallel.batch_norm import BatchNormStatistics
from tests.support.ranks import pool

# Rank 0 normalises {0, 1, 2, 3}, rank 1 {4, ..., 9}: over both the mean is 4.5 and the unbiased variance 55 / 6.
VALUES = ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
MERGED = {
    "pooled": [(4.5, 55 / 6)] * 2,
    "mean": [(4.0, (5 / 3 + 3.5) / 2)] * 2,
    "broadcast": [(1.5, 5 / 3)] * 2,
    "none": [(1.5, 5 / 3), (6.5, 3.5)],
    # Of each rank's batch and of itself plus 10: the mean and variance of all twenty values.
    "precise": [(9.5, 35.0)] * 2,
}


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1, 1, 1)


def _merge(ranks: Any, how: str) -> dict[str, Any]:
    """Statistics, counters and momentum of two layers after a forward pass and `synchronise`; and after another."""
    layers = nn.Sequential(nn.BatchNorm2d(1, momentum=1.0), nn.BatchNorm2d(1, momentum=1.0, affine=False))
    layers[0].weight.data.fill_(2.0)
    statistics = BatchNormStatistics(layers, BnSync[how])
    mine = _column(VALUES[ranks.rank])
    layers(mine)
    statistics.synchronise(lambda: [mine, mine + 10], layers)
    first = [(m.running_mean.item(), m.running_var.item()) for m in layers]
    statistics.synchronise(lambda: [mine, mine + 10], layers)
    return {
        "first": first,
        "again": [(m.running_mean.item(), m.running_var.item()) for m in layers],
        "counters": [(int(m.num_batches_tracked), m.num_batches_tracked.dtype, m.momentum) for m in layers],
        "training": layers.training,
    }


@pytest.mark.parametrize("how", [how.name for how in BnSync])
def test_two_ranks_statistics_become_one(how: str) -> None:
    found = pool(2).run(_merge, how=how)
    for rank, expected in zip(found, MERGED[how], strict=True):
        assert rank["first"][0] == pytest.approx(expected, rel=1e-6)
        # A merge with nothing trained since changes nothing.
        assert rank["again"] == rank["first"]
        assert rank["counters"] == [(1, torch.int64, 1.0)] * 2
        assert rank["training"]
    if how != "none":
        assert found[0]["first"] == found[1]["first"]
    # The second layer sees (x - mean) / sqrt(var + eps) * 2, by each rank's own numbers.
    if how == "pooled":
        assert found[0]["first"][1][0] == pytest.approx(0.0, abs=1e-6)
        assert found[0]["first"][1][1] == pytest.approx(4.0 * 10 / 9, rel=1e-3)


def _recompute_ghosts(ranks: Any) -> tuple[float, float]:
    """Recomputed statistics of a layer that normalises two images at a time."""
    layers = nn.Sequential(nn.BatchNorm2d(1))
    configure_batch_norm(layers, BatchNormConfig(statistics=BnStatistics.ghost, ghost_size=2), images=4, group=None)
    statistics = BatchNormStatistics(layers, BnSync.precise)
    mine = _column(VALUES[ranks.rank])
    layers(mine)
    statistics.synchronise(lambda: [mine, mine + 10], layers)
    return layers[0].running_mean.item(), layers[0].running_var.item()


def test_statistics_of_ghost_batches_are_recomputed_from_all_of_them() -> None:
    assert pool(2).run(_recompute_ghosts) == [pytest.approx(MERGED["precise"][0], rel=1e-6)] * 2


def _sync_step(ranks: Any, sizes: list[int]) -> dict[str, Any]:
    """Outputs, gradients and statistics of SyncBN over ranks that hold so many images each."""
    import torch.distributed as dist

    x, layer = _images()
    configure_batch_norm(
        nn.Sequential(layer), BatchNormConfig(statistics=BnStatistics.sync, momentum=0.3), images=4, group=None
    )
    first = sum(sizes[: ranks.rank])
    mine = x[first : first + sizes[ranks.rank]].clone().requires_grad_()
    out = layer(mine)
    _loss(out, first).backward()
    grads = torch.stack([layer.weight.grad, layer.bias.grad])
    dist.all_reduce(grads)
    found = {"out": out, "input": mine.grad, "grads": grads, "mean": layer.running_mean, "var": layer.running_var}
    return {name: value.detach().numpy() for name, value in found.items()} | {"kind": type(layer).__name__}


def _images() -> tuple[torch.Tensor, nn.BatchNorm2d]:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2.0)
        layer.bias.uniform_(-1.0, 1.0)
    return 3.0 * torch.randn(8, 3, 2, 3) + 5.0, layer


def _loss(out: torch.Tensor, first: int) -> torch.Tensor:
    """A sum whose gradient is another one for every image and pixel."""
    weights = torch.sin(torch.arange(first * 18, first * 18 + out.numel(), dtype=torch.float32)).reshape(out.shape)
    return (weights * out.square()).sum()


@pytest.mark.parametrize("sizes", [[4, 4], [3, 5], [1, 7]])
def test_sync_batch_norm_over_unequal_ranks_equals_one_rank(sizes: list[int]) -> None:
    x, layer = _images()
    layer.momentum = 0.3
    x.requires_grad_()
    out = layer(x)
    _loss(out, 0).backward()
    right = {
        "grads": torch.stack([layer.weight.grad, layer.bias.grad]),
        "mean": layer.running_mean,
        "var": layer.running_var,
    }
    found = pool(2).run(_sync_step, sizes=sizes)
    assert {rank["kind"] for rank in found} == {"SyncBatchNorm2d"}
    for name, value in (("out", out), ("input", x.grad)):
        together = np.concatenate([rank[name] for rank in found])
        np.testing.assert_allclose(together, value.detach().numpy(), rtol=1e-4, atol=2e-5, err_msg=name)  # type: ignore[union-attr]
    for rank in found:
        for name, value in right.items():
            np.testing.assert_allclose(rank[name], value.detach().numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


def _one_collective(ranks: Any) -> list[str]:
    """The collectives of a merge of many layers."""
    import torch.distributed as dist
    from torch.distributed import all_reduce

    layers = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(5)))
    statistics = BatchNormStatistics(layers, BnSync.pooled)
    layers(torch.ones(3, 2, 1, 1))
    seen: list[str] = []

    def counted(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen.append(str(tensor.shape))
        return all_reduce(tensor, *rest, **named)

    try:
        dist.all_reduce = counted
        statistics.synchronise(lambda: [], layers)
    finally:
        dist.all_reduce = all_reduce
    return seen


def test_a_merge_is_one_collective() -> None:
    assert pool(2).run(_one_collective) == [["torch.Size([25])"]] * 2
