"""Attention in a plan: on the planned accelerator its result and its cost; elsewhere the real kernel, counted.

Legend: T flattened tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import Kernel
from lctrain.plan.cost import Operation
from lctrain.plan.trace import Trace


class PlannedKernel:
    """What a fused kernel of an accelerator makes and leaves: the output and the log-sum-exp.

    statistics: fp32 numbers a query and head that its operator gives or takes (1: the log-sum-exp itself;
    npu_fusion_attention has 16, the softmax's maximum and sum eight times each, from which the log-sum-exp is made).
    mask_size: rows and columns of a mask that is made once, 0 for none.
    """

    def __init__(self, *, statistics: int = 1, mask_size: int = 0) -> None:
        self.name = "fused"
        self._statistics, self._mask_size = statistics, mask_size
        self._mask: torch.Tensor | None = None

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Any accelerator has one."""
        return None

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        documents: Documents,
        **how: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes only."""
        heads, rows = q_THD.shape[1], q_THD.shape[0]
        if self._mask_size and self._mask is None:
            self._mask = q_THD.new_empty(self._mask_size, self._mask_size, dtype=torch.bool)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        statistics = self._operator_s(q_THD)
        lse_HT = q_THD.new_empty(heads, rows, dtype=torch.float32)
        del statistics
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
        **how: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Shapes only; fused backward kernels accumulate dq in fp32 while they run."""
        fp32 = torch.empty_like(q_THD, dtype=torch.float32) if q_THD.itemsize == 2 else None
        statistics = self._operator_s(q_THD)
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD))
        del fp32, statistics
        return grads  # type: ignore[return-value]

    def _operator_s(self, q_THD: torch.Tensor) -> torch.Tensor | None:
        """The statistics as the operator lays them out, where that is not the log-sum-exp."""
        shape = q_THD.shape[1], q_THD.shape[0], self._statistics
        return q_THD.new_empty(shape, dtype=torch.float32) if self._statistics > 1 else None


class CountedKernel:
    """A kernel whose calls a trace counts by the (query, key) pairs inside documents, not by what it runs."""

    def __init__(self, kernel: Kernel, trace: Trace) -> None:
        self.name = kernel.name
        self._kernel, self._trace = kernel, trace

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """As the kernel."""
        return self._kernel.available(device_type, dtype)

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, documents: Documents, **how: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernel.forward."""
        with self._trace.counted_as(self._cost(4, q_THD, k_TKD, documents, **how)):
            return self._kernel.forward(q_THD, k_TKD, v_TKD, documents, **how)

    def backward(
        self,
        grad_out_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor,
        documents: Documents,
        **how: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Kernel.backward."""
        with self._trace.counted_as(self._cost(10, q_THD, k_TKD, documents, **how)):
            return self._kernel.backward(grad_out_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, documents, **how)

    def _cost(
        self,
        factor: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        documents: Documents,
        *,
        scale: float,
        causal: bool = True,
        kv_documents: Documents | None = None,
    ) -> Operation:
        """factor: operations a pair, head and dimension: 2 matmuls forward, 5 backward (Dao, arXiv:2307.08691)."""
        if causal:
            pairs = documents.causal_pairs
        else:
            spans = zip(documents.spans(), (kv_documents or documents).spans(), strict=True)
            pairs = sum((q_end - q_start) * (k_end - k_start) for (q_start, q_end), (k_start, k_end) in spans)
        heads, dim = q_THD.shape[1:]
        touched = (q_THD.numel() + k_TKD.numel()) * (factor // 2) * q_THD.itemsize
        return Operation(
            self._trace.phase, float(factor * heads * dim * pairs), float(touched), q_THD.dtype, attention=True
        )
