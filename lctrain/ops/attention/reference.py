"""Attention written as its equations in fp32: what the fast kernels are tested against.

Legend: n documents of a run, L query and M key positions, H query heads, K key/value heads, G = H / K, D head dim.

P = exp(scale Q K^T - lse), O = P V; dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)),
dQ = scale dS K, dK = scale dS^T Q (Dao et al., FlashAttention, arXiv:2205.14135, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lctrain.config.language_checks import REFERENCE_ROWS
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.runs import Run, runs


class ReferenceKernel:
    """Runs on every device and dtype; slow, fp32 inside."""

    name = "reference"

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """It always can."""
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
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        lse_HT = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=torch.float32)
        for run in runs(documents, kv_documents or documents, causal=causal):
            q_nKGLD, k_nKMD, v_nKMD = _run(q_THD, k_TKD, v_TKD, run)
            out_nKGLD, lse_nKGL = torch.empty_like(q_nKGLD), torch.empty_like(q_nKGLD[..., 0])
            for rows in _blocks(run.q_length):
                scores = _scores(q_nKGLD, k_nKMD, rows, scale=scale, causal=causal)
                lse_nKGL[..., rows] = lse = torch.logsumexp(scores, dim=-1)
                out_nKGLD[..., rows, :] = torch.exp(scores - lse[..., None]) @ v_nKMD[:, :, None]
            out_THD[run.q] = _rows(out_nKGLD).to(out_THD.dtype)
            lse_HT[:, run.q] = lse_nKGL.flatten(1, 2).transpose(0, 1).flatten(1)
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
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD))
        kv_heads = k_TKD.shape[1]
        for run in runs(documents, kv_documents or documents, causal=causal):
            q, k, v = _run(q_THD, k_TKD, v_TKD, run)
            grad_out = _grouped(grad_out_THD[run.q], run.count, kv_heads)
            delta_nKGL = (grad_out * _grouped(out_THD[run.q], run.count, kv_heads)).sum(-1)
            lse_nKGL = lse_HT[:, run.q].unflatten(1, (run.count, -1)).transpose(0, 1).unflatten(1, (kv_heads, -1))
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for rows in _blocks(run.q_length):
                scores = _scores(q, k, rows, scale=scale, causal=causal)
                probs_nKGLM = torch.exp(scores - lse_nKGL[..., rows, None])
                dv += (probs_nKGLM.transpose(-1, -2) @ grad_out[..., rows, :]).sum(2)
                dprobs = grad_out[..., rows, :] @ v[:, :, None].transpose(-1, -2)
                dscores = probs_nKGLM * (dprobs - delta_nKGL[..., rows, None])
                dq[..., rows, :] = scale * dscores @ k[:, :, None]
                dk += scale * (dscores.transpose(-1, -2) @ q[..., rows, :]).sum(2)
            parts = (dq, run.q), (dk[:, :, None], run.k), (dv[:, :, None], run.k)
            for grad, (part, where) in zip(grads, parts, strict=True):
                grad[where] = _rows(part).to(grad.dtype)
        return grads[0], grads[1], grads[2]


def _grouped(x_THD: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
    """[n * L, H, D] -> fp32 [n, K, G, L, D]."""
    x_nLKGD = x_THD.float().unflatten(0, (count, -1)).unflatten(2, (kv_heads, -1))
    return x_nLKGD.permute(0, 2, 3, 1, 4)


def _rows(x_nKGLD: torch.Tensor) -> torch.Tensor:
    """[n, K, G, L, D] -> [n * L, H, D]."""
    return x_nKGLD.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)


def _run(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, run: Run
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads = k_TKD.shape[1]
    k_nKMD = _grouped(k_TKD[run.k], run.count, kv_heads).squeeze(2)
    v_nKMD = _grouped(v_TKD[run.k], run.count, kv_heads).squeeze(2)
    return _grouped(q_THD[run.q], run.count, kv_heads), k_nKMD, v_nKMD


def _blocks(length: int) -> Iterator[slice]:
    """Queries at a time, so that scores take M * REFERENCE_ROWS instead of M * L."""
    return (slice(start, min(start + REFERENCE_ROWS, length)) for start in range(0, length, REFERENCE_ROWS))


def _scores(q_nKGLD: torch.Tensor, k_nKMD: torch.Tensor, rows: slice, *, scale: float, causal: bool) -> torch.Tensor:
    scores = scale * (q_nKGLD[..., rows, :] @ k_nKMD[:, :, None].transpose(-1, -2))
    if causal:
        q_at = torch.arange(rows.start, rows.stop, device=scores.device)
        k_at = torch.arange(k_nKMD.shape[2], device=scores.device)
        scores = scores.masked_fill(q_at[:, None] < k_at, float("-inf"))
    return scores
