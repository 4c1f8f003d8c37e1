"""FlashAttention-3's variable-length kernels for Hopper: all documents in one call, native GQA (fp16 and bf16).

Shah et al., FlashAttention-3, arXiv:2407.08608. Legend: T flattened tokens, H query heads, K key/value heads,
D head dim.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.runs import device_bounds
from lctrain.runtime.device import compute_capability

_HOPPER = 9


class Flash3Kernel:
    """The optional flash_attn_interface package, built from flash-attention's `hopper` folder."""

    name = "flash3"

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Needs a Hopper GPU, half precision and an installation that imports."""
        if device_type != "cuda":
            return f"FlashAttention-3 runs on cuda, not on {device_type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"FlashAttention-3 trains in fp16 and bf16, not in {dtype}; set precision=bf16"
        try:
            _package()
        except ImportError as error:
            return (
                f"flash_attn_interface does not import ({error}); install FlashAttention-3 from the hopper folder of "
                "the flash-attention repository"
            )
        major, minor = compute_capability(device_type)
        if major != _HOPPER:
            return f"FlashAttention-3 is for Hopper GPUs (compute capability 9.0), and this one has {major}.{minor}"
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
        cu_q, cu_k, max_q, max_k = _bounds(documents, kv_documents or documents, q_THD.device)
        # By position: releases agree on the order and not on all names. None is what this kind of call lacks:
        # new keys and values, a second query, an output, lengths in use, pages, rotary tables, fp8 scales.
        out_THD, lse_HT, *_ = _package()._flash_attn_forward(
            q_THD, k_TKD, v_TKD, None, None, None, None, cu_q, cu_k, None, None, None, max_q, max_k,
            *[None] * 9, scale, causal,
        )  # fmt: skip
        return out_THD, lse_HT

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
        """See Kernel.backward."""
        cu_q, cu_k, max_q, max_k = _bounds(documents, kv_documents or documents, q_THD.device)
        dq_THD, dk_TKD, dv_TKD = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)
        )
        _package()._flash_attn_backward(
            grad_out_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, cu_q, cu_k, None, None, max_q, max_k,
            dq_THD, dk_TKD, dv_TKD, scale, causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq_THD, dk_TKD, dv_TKD


def _package() -> ModuleType:
    return importlib.import_module("flash_attn_interface")


def _bounds(
    documents: Documents, kv_documents: Documents, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return (
        device_bounds(documents, device),
        device_bounds(kv_documents, device),
        documents.max_length,
        kv_documents.max_length,
    )
