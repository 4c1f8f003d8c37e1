"""The device mesh, with named axes, and the reductions the trainer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lctrain.config.resolve import Sizes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lctrain.runtime.device import Accelerator


class Mesh:
    """Axes, outermost first: dp_replicate, dp_shard, sp. Ranks of one sequence are neighbours.

    data_rank: which sequences this rank reads. sp_rank: which part of them.
    """

    def __init__(self, sizes: Sizes, device: Accelerator) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.sizes = sizes
        self.device = device
        self.axes: DeviceMesh = init_device_mesh(
            device.type,
            (sizes.dp_replicate, sizes.dp_shard, sizes.sp),
            mesh_dim_names=("dp_replicate", "dp_shard", "sp"),
        )
        # Parameters are sharded over every rank that is not a replica: data and sequence ranks alike.
        self._shard = self.axes["dp_shard", "sp"]._flatten("shard")
        coordinate = self.axes.get_coordinate()
        assert coordinate is not None
        self.data_rank = coordinate[0] * sizes.dp_shard + coordinate[1]
        self.sp_rank = coordinate[2]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """What fully_shard shards over: 1-D, or 2-D (replicate, shard) when there are replicas."""
        return self.axes["dp_replicate", "shard"] if self.sizes.dp_replicate > 1 else self._shard

    @property
    def sp_group(self) -> ProcessGroup:
        """Ranks that hold the parts of one sequence."""
        return self.axes.get_group("sp")

    def sum_over_data(self, values: Sequence[float], *, flag: bool = False) -> tuple[list[float], bool]:
        """Sum host numbers over data ranks (axes dp_replicate, dp_shard); and whether any rank raised `flag`."""
        import torch

        # Every sequence rank holds the same numbers; only the first contributes, so that one sum over all is enough.
        own = [float(v) if self.sp_rank == 0 else 0.0 for v in values]
        total = torch.tensor([*own, float(flag)], dtype=torch.float64)
        self._all_reduce(total)
        *sums, flags = total.tolist()
        return sums, flags > 0

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over every rank (all axes), in place."""
        self._all_reduce(value)
        return value

    def max_over_all(self, value: float) -> float:
        """Largest of a host number over every rank (all axes)."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def barrier(self) -> None:
        """Wait for every rank, over gloo."""
        import torch

        self._all_reduce(torch.zeros(1))

    @staticmethod
    def _all_reduce(tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)
