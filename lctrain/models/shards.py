"""Which part of a parameter this rank holds, whatever its layout."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """(this rank's own storage, where it lies in the whole tensor). A plain tensor is the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape), (local.shape, shape)
    return local, tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
