"""Ascend's fused attention through torch_npu: npu_fusion_attention and its gradient, called at the op level.

The op takes wrong arguments in silence (a head count, a mask that a sparse mode ignores), so everything is checked
here. One document goes in layout BSND, several as one TND call with cumulative lengths as host integers, which the
collator's Documents already are: nothing is read back from the device.

Legend: T flattened tokens, H query heads, K key/value heads, D head dim, S = 8 equal copies of each statistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from lctrain.errors import ModelError
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.runs import joined

MAX_DOCUMENTS, MAX_TOKENS = 1024, 2**20
"""Of one call (op-plugin's checks in torch_npu 2.13)."""
_MAX_HEADS, _MAX_HEAD_DIM = 256, 768
_STATISTICS = 8
_DENSE, _CAUSAL = 0, 3
"""Sparse modes: everything; right-down causal, with the compressed mask."""
MASK_SIZE = 2048
"""Rows and columns of the compressed causal mask, a byte each."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class NpuKernel:
    """npu_fusion_attention, native GQA."""

    name = "npu"

    def __init__(self) -> None:
        # One for every length and every call on a device. The kernel's own, for a plan has masks without values.
        self._masks: dict[torch.device, torch.Tensor] = {}

    def available(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Needs an NPU and torch_npu."""
        if device_type != "npu":
            return f"npu_fusion_attention runs on npu, not on {device_type}"
        if dtype not in _DTYPES:
            return f"npu_fusion_attention computes in fp16, bf16 and fp32, not in {dtype}"
        if find_spec("torch_npu") is None:
            return "torch_npu is not installed; install the one that matches torch"
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
        """See Kernel.forward. Raises ModelError for what the op would refuse or compute wrongly."""
        _check(q_THD, k_TKD, v_TKD)
        outs, lses = [], []
        for call in _calls(documents, kv_documents or documents, causal=causal):
            q, k, v = call.queries(q_THD), call.keys(k_TKD), call.keys(v_TKD)
            out, top, total, *_ = _ops().npu_fusion_attention(
                q, k, v, q_THD.shape[1], call.layout, scale=scale, **self._arguments(call, q_THD.device)
            )
            outs.append(out.view(-1, *out.shape[-2:]))
            lses.append(call.rows_last(top[..., 0] + total[..., 0].log()))
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
        """See Kernel.backward. The log-sum-exp goes in as a softmax's maximum whose sum is 1: exp(x - lse) / 1."""
        grads: tuple[list[torch.Tensor], ...] = ([], [], [])
        for call in _calls(documents, kv_documents or documents, causal=causal):
            top = call.statistics(lse_HT)
            found = _ops().npu_fusion_attention_grad(
                call.queries(q_THD), call.keys(k_TKD), call.keys(v_TKD), call.queries(grad_out_THD).contiguous(),
                q_THD.shape[1], call.layout, softmax_max=top, softmax_sum=torch.ones_like(top),
                attention_in=call.queries(out_THD), scale_value=scale, **self._arguments(call, q_THD.device),
            )  # fmt: skip
            for parts, grad in zip(grads, found, strict=False):
                parts.append(grad.view(-1, *grad.shape[-2:]))
        dq, dk, dv = (joined(parts, dim=0) for parts in grads)
        return dq, dk, dv

    def _arguments(self, call: _Call, device: torch.device) -> dict[str, Any]:
        """Mask and lengths. A sparse mode without its mask would be ignored, and attention silently full."""
        given: dict[str, Any] = {"sparse_mode": _CAUSAL if call.causal else _DENSE}
        if call.causal:
            given["atten_mask"] = self._mask(device)
        if call.layout == "TND":
            given |= {
                "actual_seq_qlen": list(call.q_ends),
                "actual_seq_kvlen": list(call.k_ends),
                "softmax_layout": "TND",
            }
        return given

    def _mask(self, device: torch.device) -> torch.Tensor:
        """The compressed causal mask, 1 where masked."""
        if device not in self._masks:
            self._masks[device] = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
        return self._masks[device]


@dataclass(frozen=True)
class _Call:
    """Documents that one call takes: their rows, and where each ends, counted from the first row."""

    q_rows: slice
    k_rows: slice
    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    causal: bool

    @property
    def layout(self) -> str:
        return "BSND" if len(self.q_ends) == 1 else "TND"

    def queries(self, x_THD: torch.Tensor) -> torch.Tensor:
        return self._shaped(x_THD[self.q_rows])

    def keys(self, x_TKD: torch.Tensor) -> torch.Tensor:
        return self._shaped(x_TKD[self.k_rows])

    def _shaped(self, x_THD: torch.Tensor) -> torch.Tensor:
        return x_THD[None] if self.layout == "BSND" else x_THD

    def rows_last(self, statistic: torch.Tensor) -> torch.Tensor:
        """[1, H, T] of BSND or [T, H] of TND to [H, T]."""
        return statistic[0] if self.layout == "BSND" else statistic.transpose(0, 1)

    def statistics(self, lse_HT: torch.Tensor) -> torch.Tensor:
        """The log-sum-exp as the op lays statistics out: [1, H, T, S] or [T, H, S], fp32."""
        rows = lse_HT[:, self.q_rows]
        rows = rows[None] if self.layout == "BSND" else rows.transpose(0, 1)
        return rows.unsqueeze(-1).expand(*rows.shape, _STATISTICS).contiguous()


@lru_cache(maxsize=64)
def _calls(documents: Documents, kv_documents: Documents, *, causal: bool) -> tuple[_Call, ...]:
    """Documents cut into calls of at most MAX_DOCUMENTS and MAX_TOKENS. Raises ModelError for a longer document."""
    assert len(documents) == len(kv_documents), (len(documents), len(kv_documents))
    spans = list(zip(documents.spans(), kv_documents.spans(), strict=True))
    return tuple(_call(spans[first:last], causal=causal) for first, last in _cuts(spans))


_Span = tuple[int, int]


def _cuts(spans: list[tuple[_Span, _Span]]) -> Iterator[tuple[int, int]]:
    first = 0
    for place, ((q_start, q_end), (k_start, k_end)) in enumerate(spans):
        longest = max(q_end - q_start, k_end - k_start)
        if longest > MAX_TOKENS:
            raise ModelError(
                f"a document of {longest:,} tokens is more than npu_fusion_attention takes at once ({MAX_TOKENS:,}); "
                "split sequences over more ranks (parallel=fsdp_cp or fsdp_usp), or set a smaller data.max_length"
            )
        (q_first, _), (k_first, _) = spans[first]
        if place - first >= MAX_DOCUMENTS or max(q_end - q_first, k_end - k_first) > MAX_TOKENS:
            yield first, place
            first = place
    yield first, len(spans)


def _call(spans: list[tuple[_Span, _Span]], *, causal: bool) -> _Call:
    (q_first, _), (k_first, _) = spans[0]
    (_, q_last), (_, k_last) = spans[-1]
    return _Call(
        slice(q_first, q_last),
        slice(k_first, k_last),
        tuple(end - q_first for (_, end), _ in spans),
        tuple(end - k_first for _, (_, end) in spans),
        causal,
    )


def _check(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
    """Raise ModelError for shapes and dtypes the op does not compute."""
    heads, kv_heads, head_dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
    if not q_THD.dtype == k_TKD.dtype == v_TKD.dtype or q_THD.dtype not in _DTYPES:
        raise ModelError(
            f"npu_fusion_attention takes queries, keys and values of one dtype out of fp16, bf16 and fp32, not "
            f"{q_THD.dtype}, {k_TKD.dtype} and {v_TKD.dtype}; use model.attention=reference"
        )
    if heads % kv_heads or heads > _MAX_HEADS or head_dim > _MAX_HEAD_DIM or k_TKD.shape != v_TKD.shape:
        raise ModelError(
            f"npu_fusion_attention takes at most {_MAX_HEADS} query heads, a multiple of the key/value heads, of at "
            f"most {_MAX_HEAD_DIM} dimensions, not {heads} over {kv_heads} of {head_dim}; use "
            "model.attention=reference"
        )


def _ops() -> Any:
    """The namespace torch_npu registers."""
    import torch_npu  # noqa: F401

    return torch.ops.npu
