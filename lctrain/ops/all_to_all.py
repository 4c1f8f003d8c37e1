"""Trade a split sequence for split heads and back, differentiably.

Legend: B batch, S whole sequence, s = S / n this rank's columns, H heads, h = H / n this rank's heads, D head dim,
n ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def seq_to_heads(x_BsHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, S/n, H, D] -> [B, S, H/n, D]: rank r receives heads [r * h, (r + 1) * h) of every position.

    Ranks hold contiguous columns in group order. H must be a multiple of n.
    """
    n = dist.get_world_size(group)
    batch, columns, heads, dim = x_BsHD.shape
    assert heads % n == 0, (heads, n)
    sent_nBshD = x_BsHD.view(batch, columns, n, heads // n, dim).permute(2, 0, 1, 3, 4).contiguous()
    got_nBshD = _exchange(sent_nBshD, group)
    return got_nBshD.transpose(0, 1).reshape(batch, n * columns, heads // n, dim)


def heads_to_seq(x_BShD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, S, H/n, D] -> [B, S/n, H, D]: the inverse of seq_to_heads."""
    n = dist.get_world_size(group)
    batch, length, heads, dim = x_BShD.shape
    assert length % n == 0, (length, n)
    sent_nBshD = x_BShD.view(batch, n, length // n, heads, dim).transpose(0, 1).contiguous()
    got_nBshD = _exchange(sent_nBshD, group)
    return got_nBshD.permute(1, 2, 0, 3, 4).reshape(batch, length // n, n * heads, dim)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Block i of the first dimension goes to rank i; one message a pair of ranks."""
    return _Exchange.apply(x, group)


class _Exchange(torch.autograd.Function):
    """Its own transpose. Results are plain tensors: torch's functional collectives give ones some kernels refuse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad.contiguous(), ctx.group), None
