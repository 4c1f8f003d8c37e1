"""The device mesh, with named axes, and the reductions the trainer needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lctrain.config.resolve import Sizes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lctrain.runtime.device import Accelerator


class Mesh:
    """Axes, outermost first: dp_replicate, dp_shard, cp, sp, tp. Ranks of one sequence are neighbours.

    data_rank: which sequences this rank reads. cp_rank, sp_rank: which part of them; tp_rank: which part
    of every matrix.
    """

    def __init__(self, sizes: Sizes, device: Accelerator) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.sizes = sizes
        self.device = device
        self.axes: DeviceMesh = init_device_mesh(
            device.type,
            (sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.sp, sizes.tp),
            mesh_dim_names=("dp_replicate", "dp_shard", "cp", "sp", "tp"),
        )
        # Parameters are sharded over every rank that is not a replica: data and sequence ranks alike.
        self._shard = self.axes["dp_shard", "cp", "sp"]._flatten("shard")
        coordinate = self.axes.get_coordinate()
        assert coordinate is not None
        self.data_rank = coordinate[0] * sizes.dp_shard + coordinate[1]
        self.cp_rank, self.sp_rank, self.tp_rank = coordinate[2:]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """What fully_shard shards over: 1-D, or 2-D (replicate, shard) when there are replicas."""
        return self.axes["dp_replicate", "shard"] if self.sizes.dp_replicate > 1 else self._shard

    @property
    def tp_mesh(self) -> DeviceMesh:
        """Ranks that hold the parts of every matrix."""
        return self.axes["tp"]

    @property
    def cp_group(self) -> ProcessGroup:
        """Ranks that hold the zigzag chunks of one sequence."""
        return self.axes.get_group("cp")

    @property
    def sp_group(self) -> ProcessGroup:
        """Ranks that hold the contiguous parts of one sequence (or of its chunks)."""
        return self.axes.get_group("sp")

    def sum_over_data(self, values: Sequence[float], *, flag: bool = False) -> tuple[list[float], bool]:
        """Sum host numbers over data ranks (axes dp_replicate, dp_shard); and whether any rank raised `flag`."""
        import torch

        # Ranks of one sequence hold the same numbers; the first contributes, so that one sum over all is enough.
        first = self.cp_rank == self.sp_rank == self.tp_rank == 0
        own = [float(v) if first else 0.0 for v in values]
        total = torch.tensor([*own, float(flag)], dtype=torch.float64)
        self._all_reduce(total)
        *sums, flags = total.tolist()
        return sums, flags > 0

    def sum_losses(self, value: torch.Tensor) -> torch.Tensor:
        """Sum ranks' losses, fp64 on the host, in place (all axes but tp, whose ranks hold the same loss)."""
        assert value.device.type == "cpu", value.device  # HCCL sums no fp64
        if self.tp_rank:
            value.zero_()
        self._all_reduce(value)
        return value

    def max_over_all(self, value: float) -> float:
        """Largest of a host number over every rank (all axes); infinite where a rank has what is no number."""
        import torch
        import torch.distributed as dist

        # A maximum may pass over one.
        tensor = torch.tensor(math.inf if math.isnan(value) else value, dtype=torch.float64)
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
