"""torch's flex attention: one call for all documents, by a mask and the list of blocks worth visiting.

Compiled on CUDA. On the CPU torch has its forward alone, uncompiled, which holds whole scores: there this is
a kernel for tests and small runs, and the backward is the reference's.

Legend: T flattened query tokens, M key tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.reference import ReferenceKernel

BLOCK = 128
"""Rows and columns of a block of scores, which the kernel skips, masks or takes whole."""


class FlexKernel:
    """`torch.nn.attention.flex_attention`."""

    name = "flex"

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """CUDA with Triton, or the CPU, in any floating-point dtype."""
        if device_type not in ("cpu", "cuda"):
            return f"torch's flex attention does not run on {device_type}"
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return f"it does not compute in {dtype}"
        if device_type == "cuda" and find_spec("triton") is None:
            return "flex attention is compiled by Triton, which is not installed; pip install triton"
        return None

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
        """See Kernel.forward."""
        mask = block_mask(documents, kv_documents or documents, causal=causal, device=q_THD.device)
        # Inside an autograd function inputs still say they want gradients, which flex attention refuses on the CPU.
        return _attend(q_THD.detach(), k_TKD.detach(), v_TKD.detach(), mask, scale)

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
        """See Kernel.backward. Where there is a kernel for it, the forward runs once more."""
        if not _differentiable(q_THD.device.type):
            return ReferenceKernel().backward(
                grad_out_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, documents,
                scale=scale, causal=causal, kv_documents=kv_documents,
            )  # fmt: skip
        mask = block_mask(documents, kv_documents or documents, causal=causal, device=q_THD.device)
        leaves = [x.detach().requires_grad_() for x in (q_THD, k_TKD, v_TKD)]
        with torch.enable_grad():
            block_out_THD, block_lse_HT = _attend(leaves[0], leaves[1], leaves[2], mask, scale)
        # The kernel's own backward knows its block alone, and `out`, `lse` may be over more keys. Over blocks b,
        #     out = sum_b w_b out_b,  w_b = exp(lse_b - lse),  lse = log sum_b exp(lse_b),
        # and w is the softmax of the lse_b, so d w_c / d lse_b = w_b ([b = c] - w_c). Hence, exactly,
        #     d out_b = w_b d out,  d lse_b = w_b <d out, out_b - out>.
        # For a block that is the whole, w = 1 and d lse_b = 0.
        w_TH = (block_lse_HT.detach() - lse_HT).exp().t()
        grad_THD = grad_out_THD.float()
        grad_lse_TH = w_TH * (grad_THD * (block_out_THD.detach().float() - out_THD.float())).sum(-1)
        grad_block_THD = (w_TH.unsqueeze(-1) * grad_THD).to(block_out_THD.dtype)
        grads = torch.autograd.grad((block_out_THD, block_lse_HT), leaves, (grad_block_THD, grad_lse_TH.t()))
        return grads[0], grads[1], grads[2]


def _differentiable(device_type: str) -> bool:
    """Whether torch has flex attention's backward there; on the CPU it refuses."""
    return device_type != "cpu"


def _attend(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, mask: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_THD, lse_HT)."""
    from torch.nn.attention.flex_attention import AuxRequest

    out_1HTD, aux = _function(q_THD.device.type)(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD)),
        block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out_1HTD.squeeze(0).transpose(0, 1), aux.lse.squeeze(0)


@lru_cache
def _function(device_type: str) -> Callable[..., Any]:
    """flex_attention as it runs on a device: compiled once, or uncompiled all through."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cpu":
        # Whole or not at all: the uncompiled fallback would hold all scores.
        return torch.compile(flex_attention, fullgraph=True)

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **kwargs)

    return uncompiled


def block_mask(documents: Documents, kv_documents: Documents, *, causal: bool, device: torch.device) -> Any:
    """The BlockMask of attention inside documents, made once a batch and kept on its Documents object.

    Blocks come from host integers: asking the mask about every pair, as torch's own constructor does,
    would build T * M of them.
    """
    kept: dict[Any, Any] = vars(documents).setdefault("_block_masks", {})
    key = (None if kv_documents is documents else kv_documents, causal, device)
    if key not in kept:
        kept[key] = _make_mask(documents, kv_documents, causal=causal, device=device)
    return kept[key]


def _make_mask(documents: Documents, kv_documents: Documents, *, causal: bool, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    q_document, kv_document = _owner(documents, device), _owner(kv_documents, device)

    # Equal lengths give equal bounds, so that causal order within documents is that of all tokens.
    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = q_document[query] == kv_document[key]
        return same & (query >= key) if causal else same

    partial, full = _block_lists(documents, kv_documents, causal=causal)
    lists: list[Any] = [x.to(device) for x in (*partial, *full)]
    options: dict[str, Any] = {"mask_mod": visible, "seq_lengths": (documents.total, kv_documents.total)}
    return BlockMask.from_kv_blocks(lists[0], lists[1], lists[2], lists[3], BLOCK_SIZE=BLOCK, **options)


def _owner(documents: Documents, device: torch.device) -> torch.Tensor:
    """Which document each token belongs to."""
    lengths = torch.tensor([end - start for start, end in documents.spans()])
    return torch.repeat_interleave(torch.arange(len(documents), dtype=torch.int32), lengths).to(device)


Blocks = tuple[torch.Tensor, torch.Tensor]


def _block_lists(documents: Documents, kv_documents: Documents, *, causal: bool) -> tuple[Blocks, Blocks]:
    """(number, indices) of the key blocks that each block of queries masks, and of those it takes whole."""
    bounds = [_key_range(documents, kv_documents, start, causal=causal) for start in range(0, documents.total, BLOCK)]
    first, whole_first, whole_last, last = torch.tensor(bounds, dtype=torch.int32).t().unsqueeze(-1)
    columns = torch.arange(-(-kv_documents.total // BLOCK), dtype=torch.int32)
    before = whole_first - first
    # Columns past a row's number are not read; they are kept in range.
    partial = torch.where(columns < before, first + columns, whole_last + columns - before).clamp(max=len(columns) - 1)
    full = (whole_first + columns).clamp(max=len(columns) - 1)
    return _listed(before + last - whole_last, partial), _listed(whole_last - whole_first, full)


def _listed(number: torch.Tensor, indices: torch.Tensor) -> Blocks:
    return number.squeeze(-1)[None, None].contiguous(), indices[None, None].contiguous()


def _key_range(documents: Documents, kv_documents: Documents, start: int, *, causal: bool) -> tuple[int, int, int, int]:
    """Key blocks [first, last) that queries from `start` see any of, with [whole first, whole last) seen whole."""
    end = min(start + BLOCK, documents.total)
    earliest = bisect_right(documents.cu_seqlens, start) - 1
    latest = bisect_right(documents.cu_seqlens, end - 1) - 1
    low, high = kv_documents.cu_seqlens[earliest], kv_documents.cu_seqlens[latest + 1]
    first, last = low // BLOCK, -(-min(high, end if causal else high) // BLOCK)
    if earliest != latest or end - start < BLOCK:
        return first, last, last, last
    whole_first = -(-low // BLOCK)
    whole_last = max(whole_first, min(high, start + 1 if causal else high) // BLOCK)
    return (first, whole_first, whole_last, last) if whole_first < whole_last else (first, last, last, last)
