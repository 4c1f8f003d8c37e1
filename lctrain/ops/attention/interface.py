"""The attention seam: one signature for every kernel, and the one autograd function around them.

Legend: B batch, S sequence, T = B * S flattened tokens, H query heads, K key/value heads, D head dim.
A query head h reads key/value head h // (H / K).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.keep import kept

Attend = Callable[..., torch.Tensor]
"""attend(q_BSHD, k_BSKD, v_BSKD, documents, *, scale) -> out_BSHD: a kernel, or a layout around one."""


class Kernel(Protocol):
    """Computes attention inside documents on one device; knows nothing of ranks.

    `documents` are the boundaries of the queries, `kv_documents` (None: the same) those of the keys and
    values; there are equally many of both, and query document i reads key document i alone. With
    `causal=True` a document's queries and keys are the same positions, so their lengths are equal.
    """

    name: str

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """None when the kernel can run on tensors of `dtype` on `device_type`, else the reason it cannot."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        documents: Documents,
        *,
        scale: float,
        causal: bool = True,
        kv_documents: Documents | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """softmax(scale * q k^T) v and its log-sum-exp: (out_THD in q's dtype, lse_HT in fp32)."""

    def backward(
        self,
        grad_out_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor,
        documents: Documents,
        *,
        scale: float,
        causal: bool = True,
        kv_documents: Documents | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq_THD, dk_TKD, dv_TKD).

        `out` and `lse` may be those of a softmax over more keys than these: the result is then this
        block's share of the gradient (dq adds over blocks), which is what a ring needs.
        """


def to_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's dtype where it is on, as torch's own attention does.

    Rotary embeddings computed in fp32 would otherwise promote q and k.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device_type)) for x in tensors)


def attend(
    kernel: Kernel,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    documents: Documents,
    scale: float,
) -> torch.Tensor:
    """Differentiable causal attention inside documents: out_THD."""
    q_THD, k_TKD, v_TKD = to_autocast_dtype(q_THD, k_TKD, v_TKD)
    assert q_THD.dtype == k_TKD.dtype == v_TKD.dtype, (q_THD.dtype, k_TKD.dtype, v_TKD.dtype)
    assert q_THD.shape[0] == k_TKD.shape[0] == documents.total, (q_THD.shape, k_TKD.shape, documents.total)
    assert q_THD.shape[1] % k_TKD.shape[1] == 0, (q_THD.shape, k_TKD.shape)
    return _Attend.apply(q_THD, k_TKD, v_TKD, kernel, documents, scale)


def attend_batch(
    kernel: Kernel,
    q_BSHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
) -> torch.Tensor:
    """`attend` on whole sequences of one rank: out_BSHD."""
    out_THD = attend(kernel, q_BSHD.flatten(0, 1), k_BSKD.flatten(0, 1), v_BSKD.flatten(0, 1), documents, scale)
    return out_THD.view(q_BSHD.shape)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kernel: Kernel,
        documents: Documents,
        scale: float,
    ) -> torch.Tensor:
        with torch.autocast(q_THD.device.type, enabled=False):
            out_THD, lse_HT = kept(lambda: kernel.forward(q_THD, k_TKD, v_TKD, documents, scale=scale))
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT)
        ctx.kernel, ctx.documents, ctx.scale = kernel, documents, scale
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_HT = ctx.saved_tensors
        with torch.autocast(q_THD.device.type, enabled=False):
            dq, dk, dv = ctx.kernel.backward(
                grad_out_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, ctx.documents, scale=ctx.scale
            )
        return dq, dk, dv, None, None, None
