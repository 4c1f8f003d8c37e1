"""The NPU kernel against a stand-in op with npu_fusion_attention's signature, layouts and checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lctrain.config.model import AttentionKernel
from lctrain.errors import ConfigError, ModelError
from lctrain.ops.attention import npu
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.interface import attend
from lctrain.ops.attention.npu import NpuKernel
from lctrain.ops.attention.reference import ReferenceKernel
from lctrain.ops.attention.select import select_kernel

HEADS, KV_HEADS, DIM = 4, 2, 8


def _read(
    q: torch.Tensor, k: torch.Tensor, head_num: int, layout: str, kwargs: dict[str, Any]
) -> tuple[Documents, Documents, bool]:
    """What the op makes of its arguments; it computes full attention when a sparse mode has no mask."""
    assert layout in ("BSND", "TND")
    assert head_num == q.shape[-2]
    mask = kwargs.get("atten_mask")
    causal = kwargs["sparse_mode"] == 3 and mask is not None
    if causal:
        assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    if layout == "BSND":
        assert q.ndim == 4
        assert q.shape[0] == 1
        return Documents((0, q.shape[1])), Documents((0, k.shape[1])), causal
    lengths = kwargs["actual_seq_qlen"], kwargs["actual_seq_kvlen"]
    assert all(isinstance(n, int) for ends in lengths for n in ends)
    assert lengths[0][-1] == q.shape[0]
    assert kwargs["softmax_layout"] == "TND"
    assert len(lengths[0]) <= npu.MAX_DOCUMENTS
    return Documents((0, *lengths[0])), Documents((0, *lengths[1])), causal


def _flat(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x[0] if layout == "BSND" else x


def _forward(q, k, v, head_num, layout, *, scale, **kwargs):
    documents, kv_documents, causal = _read(q, k, head_num, layout, kwargs)
    out, lse = ReferenceKernel().forward(
        *(_flat(x, layout) for x in (q, k, v)), documents, scale=scale, causal=causal, kv_documents=kv_documents
    )
    # The statistics are the softmax's maximum and sum; any split of the log-sum-exp into them will do.
    rows = lse[None] if layout == "BSND" else lse.t()
    top = (rows - 0.5).unsqueeze(-1).expand(*rows.shape, 8)
    return out.reshape(q.shape), top, torch.full_like(top, 0.5).exp(), torch.empty(0), 0, 0, 0


def _grad(q, k, v, dy, head_num, layout, *, softmax_max, softmax_sum, attention_in, scale_value, **kwargs):
    documents, kv_documents, causal = _read(q, k, head_num, layout, kwargs)
    assert softmax_max.dtype == torch.float32
    assert softmax_max.shape[-1] == 8
    lse = (softmax_max + softmax_sum.log())[..., 0]
    lse = lse[0] if layout == "BSND" else lse.t()
    grads = ReferenceKernel().backward(
        *(_flat(x, layout) for x in (dy, q, k, v, attention_in)), lse.contiguous(), documents,
        scale=scale_value, causal=causal, kv_documents=kv_documents,
    )  # fmt: skip
    shaped = (grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    return (*shaped, torch.empty(0), torch.empty(0))


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(npu_fusion_attention=_forward, npu_fusion_attention_grad=_grad)
    monkeypatch.setattr(npu, "_ops", lambda: stand_in)


def _tensors(rows: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(n, heads, DIM, generator=generator, requires_grad=True)
        for n, heads in ((rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    ]


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("bounds", [(0, 7), (0, 3, 4, 11)])
def test_one_document_and_a_pack_equal_the_reference(bounds: tuple[int, ...]) -> None:
    tensors = _tensors(bounds[-1], bounds[-1])
    out = attend(NpuKernel(), *tensors, Documents(bounds), 0.3)
    want = attend(ReferenceKernel(), *tensors, Documents(bounds), 0.3)
    torch.testing.assert_close(out, want)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), tensors), torch.autograd.grad(want.square().sum(), tensors), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize(("bounds", "kv_bounds"), [((0, 5), (0, 3)), ((0, 2, 5), (0, 4, 5))])
def test_a_rings_blocks_give_the_log_sum_exp_and_take_the_global_one(
    bounds: tuple[int, ...], kv_bounds: tuple[int, ...]
) -> None:
    q, k, v = (x.detach() for x in _tensors(bounds[-1], kv_bounds[-1]))
    given_ = {"scale": 0.3, "causal": False, "kv_documents": Documents(kv_bounds)}
    out, lse = NpuKernel().forward(q, k, v, Documents(bounds), **given_)
    want, want_lse = ReferenceKernel().forward(q, k, v, Documents(bounds), **given_)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    longer = want_lse + 1.5  # of a softmax over more keys than these
    for a, b in zip(
        NpuKernel().backward(q, q, k, v, want, longer, Documents(bounds), **given_),
        ReferenceKernel().backward(q, q, k, v, want, longer, Documents(bounds), **given_),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("op")
def test_more_documents_than_a_call_takes_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "MAX_DOCUMENTS", 2)
    npu._calls.cache_clear()
    tensors = _tensors(12, 12)
    documents = Documents((0, 2, 3, 7, 8, 12))
    try:
        out = attend(NpuKernel(), *tensors, documents, 0.3)
        torch.testing.assert_close(out, attend(ReferenceKernel(), *tensors, documents, 0.3))
        assert [len(call.q_ends) for call in npu._calls(documents, documents, causal=True)] == [2, 2, 1]
    finally:
        npu._calls.cache_clear()


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=40))
def test_calls_cover_every_document_once_within_the_limits(lengths: list[int]) -> None:
    documents = Documents.from_lengths(lengths)
    calls = npu._calls(documents, documents, causal=True)
    ends = [call.q_rows.start + end for call in calls for end in call.q_ends]
    assert ends == list(documents.cu_seqlens[1:])
    assert all(call.q_ends[-1] <= npu.MAX_TOKENS and len(call.q_ends) <= npu.MAX_DOCUMENTS for call in calls)


def test_what_the_op_would_compute_wrongly_is_refused() -> None:
    kernel, documents = NpuKernel(), Documents((0, 4))
    q, k, v = (x.detach() for x in _tensors(4, 4))
    for tensors, said in (
        ((q, k.half(), v), "of one dtype"),
        ((q.double(), k.double(), v.double()), "of one dtype"),
        ((q[:, :3], k, v), "not 3 over 2 of 8"),
        ((q, k, v[..., :4]), "model.attention=reference"),
    ):
        with pytest.raises(ModelError, match=said):
            kernel.forward(*tensors, documents, scale=1.0)
    long = Documents((0, npu.MAX_TOKENS + 1))
    with pytest.raises(ModelError, match="1,048,577 tokens is more than"):
        npu._calls(long, long, causal=True)


def test_it_is_chosen_on_npu_where_torch_npu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "find_spec", lambda name: object())
    assert select_kernel(AttentionKernel.auto, "npu", torch.bfloat16).name == "npu"
    monkeypatch.setattr(npu, "find_spec", lambda name: None)
    assert select_kernel(AttentionKernel.auto, "npu", torch.bfloat16).name == "reference"
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        select_kernel(AttentionKernel.npu, "npu", torch.bfloat16)
    with pytest.raises(ConfigError, match="runs on npu, not on cpu"):
        select_kernel(AttentionKernel.npu, "cpu", torch.float32)
