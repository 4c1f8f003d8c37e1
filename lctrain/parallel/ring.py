"""Context parallelism: exact attention over a sequence whose columns are spread over ranks (zigzag).

`ring_attend` passes keys and values around a ring, one rank at a time, while computing on those it
has; `allgather_attend` gathers them all first, which is fewer and larger messages and kernel calls for
few, long documents. Both take any kernel: a block's output and log-sum-exp are merged in fp32, and its
backward is the kernel's own, fed the global log-sum-exp.
Sources: Liu et al., Ring Attention, arXiv:2310.01889; zigzag order after Brandon et al., Striped
Attention, arXiv:2311.09431 (there interleaved by token, here by chunk).

Legend: B rows, S whole sequence, s = S / n this rank's columns, t = B * s, H query heads, K key/value heads,
D head dim, n ranks of the `cp` axis, P = 2 (keys, values).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel, to_autocast_dtype
from lctrain.ops.attention.keep import kept
from lctrain.parallel.blocks import Blocks, Saved
from lctrain.parallel.zigzag import chunk_starts, prefix_rectangles

_KV_TAG, _GRAD_TAG = 0, 1


def ring_attend(
    kernel: Kernel,
    q_BsHD: torch.Tensor,
    k_BsKD: torch.Tensor,
    v_BsKD: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Causal attention inside documents over columns split zigzag across `group` (axis cp): out_BsHD.

    documents: boundaries of the whole [B * S] batch. n - 1 point-to-point messages a pass and rank.
    """
    return _apply(_Ring, kernel, q_BsHD, k_BsKD, v_BsKD, documents, scale, group)


def allgather_attend(
    kernel: Kernel,
    q_BsHD: torch.Tensor,
    k_BsKD: torch.Tensor,
    v_BsKD: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """As `ring_attend`, with one all-gather forward, and one all-gather and reduce-scatter backward (axis cp)."""
    return _apply(_AllGather, kernel, q_BsHD, k_BsKD, v_BsKD, documents, scale, group)


def _apply(
    function: type[torch.autograd.Function],
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    q, k, v = to_autocast_dtype(q, k, v)
    block = Blocks(kernel, documents, q.shape[0], scale, dist.get_rank(group), dist.get_world_size(group))
    out_tHD = function.apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), block, group)
    return out_tHD.view(q.shape)


def _ring_forward(
    q: torch.Tensor, kv: torch.Tensor, blocks: Blocks, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    out = lse = torch.empty(0)
    for step in range(blocks.size):
        source = (blocks.rank - step) % blocks.size
        arriving = _pass_on(kv, group, _KV_TAG) if step < blocks.size - 1 else None
        if step == 0:
            out, lse = blocks.forward_own(q, kv)
        blocks.forward_add(q, kv, blocks.from_source(source), out, lse)
        if arriving is not None:
            kv = arriving()
    return out.to(q.dtype), lse


def _gathered_forward(
    q: torch.Tensor, kv: torch.Tensor, blocks: Blocks, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    arriving = _gather(kv, group)
    out, lse = blocks.forward_own(q, kv)
    whole = _in_order(arriving(), blocks)
    for part in prefix_rectangles(blocks.documents, blocks.rows, blocks.rank, blocks.size):
        blocks.forward_add(q, whole, part, out, lse)
    return out.to(q.dtype), lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, group: dist.ProcessGroup
    ) -> torch.Tensor:
        out, lse = kept(lambda: _ring_forward(q, torch.stack((k, v)), blocks, group))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.group = blocks, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        saved = Saved(q, out, lse, grad)
        kv = torch.stack((k, v))
        dq = torch.empty(0)
        # dkv follows its keys around the ring, one hop behind, and needs one hop more to come home.
        dkv_arriving: Callable[[], torch.Tensor] | None = None
        for step in range(blocks.size):
            source = (blocks.rank - step) % blocks.size
            arriving = _pass_on(kv, group, _KV_TAG) if step < blocks.size - 1 else None
            if step == 0:
                dq, part = blocks.backward_own(saved, kv)
            else:
                part = torch.zeros_like(kv, dtype=torch.float32)
            blocks.backward_add(saved, kv, blocks.from_source(source), dq, part)
            dkv = part if dkv_arriving is None else part.add_(dkv_arriving())
            dkv_arriving = _pass_on(dkv, group, _GRAD_TAG)
            if arriving is not None:
                kv = arriving()
        assert dkv_arriving is not None
        dk, dv = dkv_arriving().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _pass_on(x: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Callable[[], torch.Tensor]:
    """Start sending x to the next rank and receiving from the one before; call the result to wait for it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return lambda: x
    got = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, got, group=group, tag=tag, group_peer=(rank - 1) % size),
        ]
    )

    def finish() -> torch.Tensor:
        for work in works:
            work.wait()
        return got

    return finish


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, group: dist.ProcessGroup
    ) -> torch.Tensor:
        out, lse = kept(lambda: _gathered_forward(q, torch.stack((k, v)), blocks, group))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.group = blocks, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        saved = Saved(q, out, lse, grad)
        kv = torch.stack((k, v))
        arriving = _gather(kv, group)
        dq, own = blocks.backward_own(saved, kv)
        whole = _in_order(arriving(), blocks)
        dwhole = torch.zeros_like(whole, dtype=torch.float32)
        for part in prefix_rectangles(blocks.documents, blocks.rows, blocks.rank, blocks.size):
            blocks.backward_add(saved, whole, part, dq, dwhole)
        mine = torch.empty_like(own)
        dist.reduce_scatter_tensor(mine, _by_rank(dwhole, blocks).flatten(0, 1), group=group)
        dk, dv = (mine + own).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _gather(kv: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start gathering kv_PtKD of all ranks; call the result for [n, P, t, K, D]."""
    size = dist.get_world_size(group)
    got = kv.new_empty((size * kv.shape[0], *kv.shape[1:]))
    work = dist.all_gather_into_tensor(got, kv, group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        return got.unflatten(0, (size, kv.shape[0]))

    return finish


def _chunk_order(blocks: Blocks) -> list[int]:
    """Where each chunk of the sequence lies among all ranks' chunks, two a rank."""
    length = 2 * blocks.size
    held = [first for rank in range(blocks.size) for first in chunk_starts(length, rank, blocks.size)]
    return [held.index(chunk) for chunk in range(length)]


def _in_order(gathered_nPtKD: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[n, P, t, K, D] to [P, B * S, K, D], columns in the sequence's order."""
    parts = gathered_nPtKD.unflatten(2, (blocks.rows, 2, -1))  # n P B 2 c K D
    by_chunk = parts.permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 3)  # P B 2n c K D
    return by_chunk[:, :, _chunk_order(blocks)].flatten(1, 3)


def _by_rank(whole_PTKD: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The inverse of _in_order, contiguous."""
    n, rows = blocks.size, blocks.rows
    order = _chunk_order(blocks)
    inverse = [order.index(i) for i in range(2 * n)]
    by_chunk = whole_PTKD.unflatten(1, (rows, 2 * n, -1))[:, :, inverse]  # P B 2n c K D
    return by_chunk.unflatten(2, (n, 2)).permute(2, 0, 1, 3, 4, 5, 6).flatten(2, 4).contiguous()
