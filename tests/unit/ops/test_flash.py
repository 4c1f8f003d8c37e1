"""The flash-attn kernel against a stand-in package with flash-attn 2.7's signatures."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lctrain.config.model import AttentionKernel
from lctrain.errors import ConfigError
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import attend
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.select import select_kernel


def _documents(cu_seqlens: torch.Tensor) -> Documents:
    assert cu_seqlens.dtype == torch.int32
    return Documents(tuple(cu_seqlens.tolist()))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None,
):  # fmt: skip
    documents, kv_documents = _documents(cu_seqlens_q), _documents(cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k, dropout_p) == (documents.max_length, kv_documents.max_length, 0.0)
    out, lse = ReferenceKernel().forward(
        q, k, v, documents, scale=softmax_scale, causal=causal, kv_documents=kv_documents
    )
    return out, lse, torch.empty(0), torch.zeros(2)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
    grads = ReferenceKernel().backward(
        dout, q, k, v, out, softmax_lse, _documents(cu_seqlens_q), scale=softmax_scale, causal=causal,
        kv_documents=_documents(cu_seqlens_k),
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return torch.empty(0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.mark.usefixtures("package")
def test_calls_match_the_package_and_auto_prefers_it() -> None:
    kernel = select_kernel(AttentionKernel.auto, "cuda", torch.bfloat16)
    assert kernel.name == "flash"
    documents = Documents((0, 3, 10))
    tensors = [torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out = attend(kernel, *tensors, documents, 0.3)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    want = attend(ReferenceKernel(), *tensors, documents, 0.3)
    assert torch.equal(out, want)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), tensors), strict=True):
        assert torch.equal(a, b)


def test_without_the_package_the_reason_and_the_mend_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"does not import.*pip install flash-attn.*model.attention=auto"):
        select_kernel(AttentionKernel.flash, "cuda", torch.bfloat16)
    assert select_kernel(AttentionKernel.auto, "cuda", torch.bfloat16).name == "sdpa"
