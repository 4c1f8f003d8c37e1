"""The FlashAttention-3 kernel against stand-ins with the signatures of its releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from lctrain.config.model import AttentionKernel
from lctrain.errors import ConfigError
from lctrain.ops.attention import flash3
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.flash3 import Flash3Kernel
from lctrain.ops.attention.interface import attend
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.select import select_kernel


def _documents(cu_seqlens: torch.Tensor) -> Documents:
    assert cu_seqlens.dtype == torch.int32
    return Documents(tuple(cu_seqlens.tolist()))


def _compute_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, unused):
    documents, kv_documents = _documents(cu_q), _documents(cu_k)
    assert (max_q, max_k) == (documents.max_length, kv_documents.max_length)
    assert all(x is None for x in unused)
    return ReferenceKernel().forward(q, k, v, documents, scale=scale, causal=causal, kv_documents=kv_documents)


def _compute_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dq, dk, dv, scale, causal):
    grads = ReferenceKernel().backward(
        dout, q, k, v, out, lse, _documents(cu_q), scale=scale, causal=causal, kv_documents=_documents(cu_k)
    )
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)


def _forward_3_0(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    unused = (
        k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale,
    )  # fmt: skip
    found = _compute_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, unused
    )
    return *found, None, None


def _backward_3_0(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
    dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert (sequed_q, sequed_k, window_size, softcap, sm_margin) == (None, None, (-1, -1), 0.0, 0)
    _compute_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, causal,
    )  # fmt: skip
    return dq, dk, dv, torch.empty(0)


def _forward_3_1(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    unused = (
        k_new, v_new, qv, out_, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale,
    )  # fmt: skip
    assert (window_size_left, window_size_right) == (-1, -1)
    found = _compute_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, unused
    )
    return *found, torch.empty(0), torch.empty(0)


def _backward_3_1(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert (sequed_q, sequed_k, window_size_left, window_size_right, softcap) == (None, None, -1, -1, 0.0)
    _compute_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, is_causal,
    )  # fmt: skip
    return torch.empty(0)


RELEASES = {"3.0": (_forward_3_0, _backward_3_0), "3.1": (_forward_3_1, _backward_3_1)}


def _install(
    monkeypatch: pytest.MonkeyPatch, functions: tuple[Callable[..., Any], ...], capability: tuple[int, int] = (9, 0)
) -> None:
    package = ModuleType("flash_attn_interface")
    package._flash_attn_forward, package._flash_attn_backward = functions
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(flash3, "compute_capability", lambda device_type: capability)


@pytest.mark.parametrize("release", RELEASES)
def test_calls_match_every_release_and_auto_prefers_it(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, RELEASES[release])
    kernel = select_kernel(AttentionKernel.auto, "cuda", torch.bfloat16)
    assert kernel.name == "flash3"
    documents = Documents((0, 3, 10))
    tensors = [torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out = attend(kernel, *tensors, documents, 0.3)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    want = attend(ReferenceKernel(), *tensors, documents, 0.3)
    assert torch.equal(out, want)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), tensors), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("release", RELEASES)
def test_a_block_of_a_ring_is_passed_on_whole(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not causal, keys of other lengths, and a log-sum-exp over more keys."""
    _install(monkeypatch, RELEASES[release])
    documents, kv_documents = Documents((0, 5, 12)), Documents((0, 9, 11))
    q, k, v = torch.randn(12, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    found = []
    for kernel in (Flash3Kernel(), ReferenceKernel()):
        out, lse = kernel.forward(q, k, v, documents, scale=0.3, causal=False, kv_documents=kv_documents)
        grads = kernel.backward(
            out, q, k, v, 0.5 * out, lse + 1.0, documents, scale=0.3, causal=False, kv_documents=kv_documents
        )
        found.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_generations_and_missing_packages_are_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, RELEASES["3.1"], capability=(8, 0))
    with pytest.raises(ConfigError, match=r"flash3 cannot run.*Hopper.*this one has 8\.0.*model.attention=auto"):
        select_kernel(AttentionKernel.flash3, "cuda", torch.bfloat16)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ConfigError, match=r"does not import.*hopper folder.*model.attention=auto"):
        select_kernel(AttentionKernel.flash3, "cuda", torch.bfloat16)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert select_kernel(AttentionKernel.auto, "cuda", torch.bfloat16).name == "sdpa"
