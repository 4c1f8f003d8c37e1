"""torch's built-in attention kernels, called at the aten level because they return the log-sum-exp.

Legend: n documents of a run, L positions, T flattened tokens, H query heads, K key/value heads, D head dim.

| device | dtype | op | documents |
|---|---|---|---|
| cpu | all | _scaled_dot_product_flash_attention_for_cpu | one call a run of equal lengths, native GQA |
| cuda | fp16, bf16 | _flash_attention_forward | one call, variable lengths, native GQA |
| cuda | other, or a head dim flash refuses | _scaled_dot_product_efficient_attention | one call a run |
"""

from __future__ import annotations

import torch

from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.runs import Run, device_bounds, joined, runs

aten = torch.ops.aten
_LSE_ALIGN = 32
"""The memory-efficient kernel pads its log-sum-exp to this many positions, with +inf."""


class SdpaKernel:
    """What torch itself ships, on CPU and CUDA."""

    name = "sdpa"

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Only CPU and CUDA ops return a log-sum-exp."""
        if device_type not in ("cpu", "cuda"):
            return f"torch's attention returns no log-sum-exp on {device_type}"
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return f"it does not compute in {dtype}"
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
        kv_documents = kv_documents or documents
        groups = runs(documents, kv_documents, causal=causal)
        if _variable_length(q_THD):
            bounds = _bounds(documents, kv_documents, q_THD.device)
            out_THD, lse_HT, *_ = aten._flash_attention_forward(
                q_THD, k_TKD, v_TKD, *bounds, 0.0, causal, False, scale=scale
            )
            return out_THD, lse_HT
        outs, lses = [], []
        repeat = q_THD.device.type != "cpu"
        for run in groups:
            q, k, v = _batched(q_THD, k_TKD, v_TKD, run, repeat=repeat)
            out_nHLD, lse_nHL = _dense_forward(q, k, v, scale=scale, causal=causal)
            outs.append(_rows(out_nHLD))
            lses.append(lse_nHL.transpose(0, 1).flatten(1))
        return joined(outs, dim=0), joined(lses, dim=1)

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
        kv_documents = kv_documents or documents
        groups = runs(documents, kv_documents, causal=causal)
        if _variable_length(q_THD):
            bounds = _bounds(documents, kv_documents, q_THD.device)
            # No dropout, so the random state is never read; the op still wants its tensors.
            state, unused = q_THD.new_zeros(2, dtype=torch.uint64), q_THD.new_empty(0)
            return aten._flash_attention_backward(
                grad_out_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, *bounds, 0.0, causal, state, unused, scale=scale
            )
        dqs, dks, dvs = [], [], []
        for run in groups:
            # The CPU's backward works on key/value heads in parallel: with fewer of them than threads it waits.
            busy = run.count * k_TKD.shape[1] >= torch.get_num_threads()
            q, k, v = _batched(q_THD, k_TKD, v_TKD, run, repeat=q_THD.device.type != "cpu" or not busy)
            grad_out, out = _heads_first(grad_out_THD[run.q], run.count), _heads_first(out_THD[run.q], run.count)
            lse_nHL = lse_HT[:, run.q].unflatten(1, (run.count, run.q_length)).transpose(0, 1)
            dq, dk, dv = _dense_backward(grad_out, q, k, v, out, lse_nHL, scale=scale, causal=causal)
            dqs.append(_rows(dq))
            dks.append(_sum_groups(_rows(dk), k_TKD.shape[1]))
            dvs.append(_sum_groups(_rows(dv), v_TKD.shape[1]))
        return joined(dqs, dim=0), joined(dks, dim=0), joined(dvs, dim=0)


def _variable_length(q_THD: torch.Tensor) -> bool:
    head_dim = q_THD.shape[-1]
    half = q_THD.dtype in (torch.float16, torch.bfloat16)
    return q_THD.device.type != "cpu" and half and head_dim % 8 == 0 and head_dim <= 256


def _bounds(
    documents: Documents, kv_documents: Documents, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return (
        device_bounds(documents, device),
        device_bounds(kv_documents, device),
        documents.max_length,
        kv_documents.max_length,
    )


def _heads_first(x_THD: torch.Tensor, count: int) -> torch.Tensor:
    """[n * L, H, D] -> [n, H, L, D], a view."""
    return x_THD.unflatten(0, (count, -1)).transpose(1, 2)


def _rows(x_nHLD: torch.Tensor) -> torch.Tensor:
    """[n, H, L, D] -> [n * L, H, D]."""
    return x_nHLD.transpose(1, 2).flatten(0, 1)


def _batched(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, run: Run, *, repeat: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One run as [n, H, L, D]; `repeat` gives keys and values H heads, for ops without GQA."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD[run.k], v_TKD[run.k]
    if repeat and group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return _heads_first(q_THD[run.q], run.count), _heads_first(k, run.count), _heads_first(v, run.count)


def _sum_groups(x_THD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Gradient of repeat_interleave over heads; summed in fp32."""
    if x_THD.shape[1] == kv_heads:
        return x_THD
    return x_THD.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32).to(x_THD.dtype)


def _dense_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _dense_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse_nHL: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse_nHL, 0.0, causal, scale=scale
        )
    if torch.version.hip is None:
        lse_nHL = torch.nn.functional.pad(lse_nHL, (0, -lse_nHL.shape[-1] % _LSE_ALIGN), value=float("inf"))
    seed, offset = q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        q,
        k,
        v,
        None,
        out,
        lse_nHL.contiguous(),
        seed,
        offset,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv
