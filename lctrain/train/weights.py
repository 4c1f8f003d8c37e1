"""Whether all ranks begin with the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist


def same_everywhere(digest: str) -> None:
    """Compare a hash over all ranks with one collective (axes: all).

    digest: hexadecimal. Raises RuntimeError when ranks differ.
    """
    number = torch.tensor(int(digest[:12], 16), dtype=torch.float64)  # 48 bits are exact in a double
    both = torch.stack([number, -number])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if both[0] != -both[1]:
        raise RuntimeError("ranks drew different random weights; their torch or transformers versions differ")
