"""flash-attn's variable-length kernels: all documents in one call, native GQA (CUDA, fp16 and bf16).

Legend: T flattened tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.runs import device_bounds


class FlashKernel:
    """The optional flash-attn package (2.7 or later)."""

    name = "flash"

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Needs CUDA, half precision and an installation that imports."""
        if device_type != "cuda":
            return f"flash-attn runs on cuda, not on {device_type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn computes in fp16 and bf16, not in {dtype}; set precision=bf16"
        try:
            _package()
        except ImportError as error:
            return f"flash-attn does not import ({error}); pip install flash-attn"
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
        out_THD, lse_HT, *_ = _package()._flash_attn_varlen_forward(
            q_THD,
            k_TKD,
            v_TKD,
            **_bounds(documents, kv_documents or documents, q_THD),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
        )
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
        dq_THD, dk_TKD, dv_TKD = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)
        )
        _package()._flash_attn_varlen_backward(
            grad_out_THD,
            q_THD,
            k_TKD,
            v_TKD,
            out_THD,
            lse_HT,
            dq_THD,
            dk_TKD,
            dv_TKD,
            **_bounds(documents, kv_documents or documents, q_THD),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq_THD, dk_TKD, dv_TKD


def _package() -> ModuleType:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _bounds(documents: Documents, kv_documents: Documents, q_THD: torch.Tensor) -> dict[str, torch.Tensor | int]:
    return {
        "cu_seqlens_q": device_bounds(documents, q_THD.device),
        "cu_seqlens_k": device_bounds(kv_documents, q_THD.device),
        "max_seqlen_q": documents.max_length,
        "max_seqlen_k": kv_documents.max_length,
    }
