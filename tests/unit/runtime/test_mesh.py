"""Sums over the mesh: counts once for each data rank, losses over all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import pool


def _mesh(ranks: Any, layout: str, **fields: int) -> dict[str, Any]:
    """What a rank of `layout` sees of its mesh."""
    import torch

    from lctrain.config.registry import classes
    from lctrain.config.resolve import layout_sizes
    from lctrain.runtime.device import Accelerator
    from lctrain.runtime.mesh import Mesh

    mesh = Mesh(layout_sizes(classes("parallel")[layout](**fields), ranks.world_size), Accelerator("cpu", 0))
    sums, quiet = mesh.sum_over_data([1.0, 10.0 * (mesh.data_rank + 1)])
    _, asked = mesh.sum_over_data([0.0], flag=ranks.rank == ranks.world_size - 1)
    total = mesh.sum_losses(torch.tensor(float(ranks.rank + 1), dtype=torch.float64))
    largest = mesh.max_over_all(float(ranks.rank))
    mesh.barrier()
    return {
        "place": (mesh.data_rank, mesh.sp_rank),
        "sums": sums,
        "flags": (quiet, asked),
        "total": float(total),
        "largest": largest,
        "shards": mesh.shard_mesh.shape,
    }


@pytest.mark.parametrize(
    ("size", "layout", "fields", "places", "sums", "shards"),
    [
        (1, "single", {}, [(0, 0)], [1, 10], (1,)),
        (2, "ddp", {}, [(0, 0), (1, 0)], [2, 30], (2, 1)),
        (2, "fsdp", {}, [(0, 0), (1, 0)], [2, 30], (2,)),
        (2, "hsdp", {}, [(0, 0), (1, 0)], [2, 30], (2, 1)),
        (2, "fsdp_sp", {}, [(0, 0), (0, 1)], [1, 10], (2,)),
        (4, "fsdp_sp", {"sp_size": 2}, [(0, 0), (0, 1), (1, 0), (1, 1)], [2, 30], (4,)),
        (4, "hsdp", {}, [(0, 0), (1, 0), (2, 0), (3, 0)], [4, 100], (2, 2)),
    ],
)
def test_places_and_sums(size: int, layout: str, fields: dict[str, int], places: Any, sums: Any, shards: Any) -> None:
    results = pool(size).run(_mesh, layout=layout, **fields)
    assert [r["place"] for r in results] == places
    for result in results:
        assert result["sums"] == sums
        assert result["flags"] == (False, True)
        assert result["total"] == size * (size + 1) / 2
        assert result["largest"] == size - 1
        assert result["shards"] == shards
