"""Kernels against the reference, the reference against torch, and documents that must not see each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lctrain.config.model import AttentionKernel
from lctrain.errors import ConfigError
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.flex import FlexKernel
from lctrain.ops.attention.interface import attend, attend_batch
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.runs import Run, device_bounds, runs
from lctrain.ops.attention.sdpa import SdpaKernel
from lctrain.ops.attention.select import select_kernel

KERNELS = [SdpaKernel(), FlexKernel(), ReferenceKernel()]
MIXED = Documents((0, 7, 14, 21, 22, 40))


def _inputs(tokens: int, heads: int, kv_heads: int, dim: int = 16, dtype: torch.dtype = torch.float32, keys: int = 0):
    generator = torch.Generator().manual_seed(tokens * 100 + heads * 10 + kv_heads)
    shapes = (tokens, heads, dim), (keys or tokens, kv_heads, dim), (keys or tokens, kv_heads, dim)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def _torch_attention(q, k, v, documents: Documents, scale: float) -> torch.Tensor:
    """One torch SDPA call a document, differentiated by autograd."""
    outs = []
    for start, end in documents.spans():
        parts = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _with_grads(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_forward_and_backward_equal_torch(kernel, heads: int, kv_heads: int) -> None:
    tensors = _inputs(MIXED.total, heads, kv_heads)
    got = _with_grads(lambda q, k, v: attend(kernel, q, k, v, MIXED, 0.3), tensors)
    want = _with_grads(lambda q, k, v: _torch_attention(q, k, v, MIXED, 0.3), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
)
def test_kernels_equal_reference_on_random_boundaries(lengths: list[int], heads: tuple[int, int]) -> None:
    documents = Documents.from_lengths(lengths)
    tensors = _inputs(documents.total, *heads, dim=8)
    *others, want = (
        _with_grads(lambda q, k, v, kernel=kernel: attend(kernel, q, k, v, documents, 0.4), tensors)
        for kernel in KERNELS
    )
    for got in others:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_reference(dtype: torch.dtype) -> None:
    tensors = _inputs(MIXED.total, 4, 2, dtype=dtype)
    *others, want = (
        _with_grads(lambda q, k, v, kernel=kernel: attend(kernel, q, k, v, MIXED, 0.25), tensors) for kernel in KERNELS
    )
    for got in others:
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_log_sum_exp_is_that_of_the_scores() -> None:
    q, k, v = _inputs(MIXED.total, 4, 2)
    for kernel in KERNELS:
        _, lse_HT = kernel.forward(q, k, v, MIXED, scale=0.3)
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1))
        belongs = torch.repeat_interleave(torch.arange(5), torch.tensor([7, 7, 7, 1, 18]))
        visible = (belongs[:, None] == belongs) & torch.ones(40, 40, dtype=torch.bool).tril()
        want = torch.logsumexp(scores.masked_fill(~visible, float("-inf")), dim=-1)
        assert lse_HT.dtype == torch.float32
        torch.testing.assert_close(lse_HT, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_blocks_merged_by_log_sum_exp_are_the_whole(kernel) -> None:
    """What a ring does: second half of the queries against both halves of the keys, global lse in the backward."""
    whole, half = Documents((0, 32)), Documents((0, 16))
    q, k, v = _inputs(32, 4, 2)
    out, lse = kernel.forward(q, k, v, whole, scale=0.3)
    grad = torch.randn_like(out)
    grad[:16] = 0
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, whole, scale=0.3)
    first, second = slice(0, 16), slice(16, 32)
    parts = [
        kernel.forward(q[second], k[rows], v[rows], half, scale=0.3, causal=causal, kv_documents=half)
        for rows, causal in ((first, False), (second, True))
    ]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * (block - total).exp().t()[..., None] for o, block in parts)
    torch.testing.assert_close(merged, out[second], rtol=1e-5, atol=1e-6)
    args = q[second], k, v, out[second], lse[:, second].contiguous()
    back = [
        kernel.backward(
            grad[second], args[0], k[rows], v[rows], args[3], args[4], half, scale=0.3, causal=causal, kv_documents=half
        )
        for rows, causal in ((first, False), (second, True))
    ]
    torch.testing.assert_close(back[0][0] + back[1][0], dq[second], rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(torch.cat([back[0][1], back[1][1]]), dk, rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(torch.cat([back[0][2], back[1][2]]), dv, rtol=1e-4, atol=5e-6)


def test_queries_and_keys_may_have_different_lengths_when_not_causal() -> None:
    documents, kv_documents = Documents((0, 5, 12)), Documents((0, 9, 11))
    q, k, v = _inputs(12, 4, 2, keys=11)
    results = []
    for kernel in KERNELS:
        out, lse = kernel.forward(q, k, v, documents, scale=0.3, causal=False, kv_documents=kv_documents)
        grads = kernel.backward(out, q, k, v, out, lse, documents, scale=0.3, causal=False, kv_documents=kv_documents)
        results.append((out, lse, *grads))
    *others, want = results
    for got in others:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_other_documents_do_not_change_a_bit(kernel) -> None:
    q, k, v = _inputs(MIXED.total, 4, 2)
    before = attend(kernel, q, k, v, MIXED, 0.3)
    for x in (q, k, v):
        x[3] += 1.0
    after = attend(kernel, q, k, v, MIXED, 0.3)
    assert torch.equal(before[7:], after[7:])
    assert not torch.equal(before[:7], after[:7])


def test_attend_batch_takes_heads_first_views() -> None:
    documents = Documents((0, 5, 10, 14, 20))
    q, k, v = (x.view(2, 10, -1, 16) for x in _inputs(20, 4, 2))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    got = attend_batch(SdpaKernel(), *strided, documents, scale=0.3)
    assert got.shape == q.shape
    assert torch.equal(got, attend_batch(SdpaKernel(), q, k, v, documents, scale=0.3))


def test_autocast_computes_in_its_dtype_and_returns_fp32_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in _inputs(MIXED.total, 4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(ReferenceKernel(), q, k, v.to(torch.bfloat16), MIXED, 0.3)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_tokens_outside_documents_are_an_error() -> None:
    q, k, v = _inputs(12, 4, 2)
    with pytest.raises(AssertionError):
        attend(SdpaKernel(), q, k, v, Documents((0, 5, 11)), 0.3)


def test_runs_group_equal_lengths_into_one_call() -> None:
    documents = Documents((0, 4, 8, 12, 13, 17))
    assert runs(documents, documents, causal=True) == (Run(3, 0, 4, 0, 4), Run(1, 12, 1, 12, 1), Run(1, 13, 4, 13, 4))
    with pytest.raises(AssertionError):
        runs(documents, Documents((0, 4, 8, 12, 13, 18)), causal=True)


def test_device_bounds_are_made_once_a_batch() -> None:
    documents = Documents((0, 4, 8))
    first = device_bounds(documents, torch.device("cpu"))
    assert first.dtype == torch.int32
    assert first.tolist() == [0, 4, 8]
    assert device_bounds(documents, torch.device("cpu")) is first


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.float16, 12)])
def test_accelerator_ops_take_what_sdpa_gives_them(dtype: torch.dtype, dim: int) -> None:
    """On meta the CUDA branch runs through the ops' schemas and shape functions."""
    q, k, v = (torch.empty(40, h, dim, dtype=dtype, device="meta") for h in (8, 2, 2))
    kernel = SdpaKernel()
    out, lse = kernel.forward(q, k, v, MIXED, scale=0.3)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((8, 40), torch.float32)
    grads = kernel.backward(out, q, k, v, out, lse, MIXED, scale=0.3)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_selection() -> None:
    assert select_kernel(AttentionKernel.auto, "cpu", torch.float32).name == "sdpa"
    assert select_kernel(AttentionKernel.reference, "cpu", torch.float32).name == "reference"
    assert select_kernel(AttentionKernel.flex, "cpu", torch.float32).name == "flex"
    assert select_kernel(AttentionKernel.auto, "npu", torch.bfloat16).name == "reference"
    with pytest.raises(ConfigError, match=r"model.attention=flash cannot run: flash-attn runs on cuda.*auto"):
        select_kernel(AttentionKernel.flash, "cpu", torch.bfloat16)
    for kernel in (AttentionKernel.flash, AttentionKernel.flash3):
        with pytest.raises(ConfigError, match=r"float32.*precision=bf16"):
            select_kernel(kernel, "cuda", torch.float32)
    with pytest.raises(ConfigError, match=r"model.attention=flash3 cannot run.* runs on cuda, not on cpu"):
        select_kernel(AttentionKernel.flash3, "cpu", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"model.attention=flex cannot run.*npu.*auto"):
        select_kernel(AttentionKernel.flex, "npu", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"model.attention=sdpa cannot run.*npu"):
        select_kernel(AttentionKernel.sdpa, "npu", torch.bfloat16)
