"""Ulysses sequence parallelism: split columns become split heads around any attention.

Legend: B batch, S whole sequence, s = S / n this rank's columns, H query heads, K key/value heads, D head dim,
n ranks of the `sp` axis; h = H / n query heads and k key/value heads of this rank.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from lctrain.errors import ModelError
from lctrain.ops.all_to_all import heads_to_seq, seq_to_heads
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Attend


def ulysses_attend(
    inner: Attend,
    q_BsHD: torch.Tensor,
    k_BsKD: torch.Tensor,
    v_BsKD: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Causal attention inside documents over a sequence split across `group`: out_BsHD of this rank's columns.

    inner: attention of all the group's columns on this rank's heads (a kernel, or a ring of wider groups);
    documents: boundaries of the whole [B * S] batch. Two all-to-alls over the group: q, k and v there in
    one message, the output back. Key/value heads are repeated as little as lets every rank hold the ones
    its query heads read: to lcm(K, n) heads; autograd sums the copies' gradients.
    Raises ModelError when n does not divide H.
    """
    n = dist.get_world_size(group)
    heads, kv_heads = q_BsHD.shape[2], k_BsKD.shape[2]
    if heads % n:
        raise ModelError(
            f"parallel.sp_size={n} does not divide the model's {heads} attention heads; "
            f"choose parallel.sp_size from the divisors of {heads}"
        )
    repeat = math.lcm(kv_heads, n) // kv_heads
    if repeat > 1:
        k_BsKD, v_BsKD = k_BsKD.repeat_interleave(repeat, dim=2), v_BsKD.repeat_interleave(repeat, dim=2)
    h, k = heads // n, kv_heads * repeat // n
    per_rank = [x.unflatten(2, (n, -1)) for x in (q_BsHD, k_BsKD, v_BsKD)]
    qkv_BShD = seq_to_heads(torch.cat(per_rank, dim=3).flatten(2, 3), group)
    q_BShD, k_BSkD, v_BSkD = qkv_BShD.split([h, k, k], dim=2)
    out_BShD = inner(q_BShD, k_BSkD, v_BSkD, documents, scale=scale)
    return heads_to_seq(out_BShD, group)
