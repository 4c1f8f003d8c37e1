"""Which part of a parameter this rank holds, whatever shards it: nothing, DTensor or DeepSpeed ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

Slices = tuple[slice, ...]


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The whole tensor's shape. ZeRO-3 leaves an empty tensor in place of a parameter that is not gathered."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Slices]:
    """(this rank's own storage, where it lies in the whole tensor). A plain tensor is the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape), (local.shape, shape)
    return local, tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


@contextmanager
def writable_part(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Slices]]:
    """`local_part` for filling a parameter in place; ranks must agree on the values.

    A ZeRO-3 parameter is gathered for the while (a collective), filled whole, and split again.
    """
    if not hasattr(tensor, "ds_id"):
        yield local_part(tensor)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
        yield tensor.data, tuple(slice(0, size) for size in tensor.shape)
