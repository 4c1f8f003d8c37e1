"""Flex attention beyond what all kernels share: its list of blocks, and its backward by differentiation.

torch has no flex backward on the CPU and says so before it starts; the operator's own one does run there. With that
check out of the way, what runs on an accelerator is tested here, against the reference.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lctrain.ops.attention import flex
from lctrain.ops.attention.documents import Documents
from lctrain.ops.attention.flex import BLOCK, FlexKernel, block_mask
from lctrain.ops.attention.reference import ReferenceKernel

CPU = torch.device("cpu")


@st.composite
def boundaries(draw: st.DrawFn) -> tuple[Documents, Documents, bool]:
    """(queries' documents, keys' documents, causal) over a few blocks, with bounds on and off their edges."""
    edge = st.sampled_from([BLOCK, 2 * BLOCK, 3 * BLOCK])
    lengths = draw(st.lists(st.one_of(st.integers(1, 2 * BLOCK), edge), min_size=1, max_size=4))
    documents = Documents.from_lengths(lengths)
    if draw(st.booleans()):
        return documents, documents, True
    keys = draw(st.lists(st.one_of(st.integers(1, 2 * BLOCK), edge), min_size=len(lengths), max_size=len(lengths)))
    return documents, Documents.from_lengths(keys), False


def _blocks(number: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """The listed key blocks of each block of queries."""
    return [row[:n].tolist() for n, row in zip(number[0, 0].tolist(), indices[0, 0], strict=True)]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(boundaries())
def test_blocks_are_those_of_torch_which_asks_about_every_pair(case: tuple[Documents, Documents, bool]) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    documents, kv_documents, causal = case
    ours = block_mask(documents, kv_documents, causal=causal, device=CPU)
    theirs = create_block_mask(
        ours.mask_mod, None, None, documents.total, kv_documents.total, device="cpu", BLOCK_SIZE=BLOCK
    )
    assert ours.shape == theirs.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        mine, right = (
            _blocks(getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")) for mask in (ours, theirs)
        )
        assert mine == [sorted(row) for row in right], kind


def test_mask_is_made_once_a_batch() -> None:
    documents, kv_documents = Documents((0, 4, 8)), Documents((0, 2, 3))
    first = block_mask(documents, documents, causal=True, device=CPU)
    assert block_mask(documents, documents, causal=True, device=CPU) is first
    assert block_mask(documents, kv_documents, causal=False, device=CPU) is not first


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> FlexKernel:
    """The kernel as on an accelerator: gradients come from differentiating flex attention."""
    module = sys.modules["torch.nn.attention.flex_attention"]
    monkeypatch.setattr(module, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(flex, "_differentiable", lambda device_type: True)
    return FlexKernel()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_block_backward_takes_the_whole_softmax(differentiated: FlexKernel, heads: int, kv_heads: int) -> None:
    """A query sees two blocks of keys; each block's gradients come from the log-sum-exp over both."""
    documents, kv_documents = Documents((0, 5, 12)), Documents((0, 9, 11))
    q = torch.randn(12, heads, 16)
    blocks = [[torch.randn(11, kv_heads, 16) for _ in range(2)] for _ in range(2)]
    reference = ReferenceKernel()
    kind = {"scale": 0.3, "causal": False, "kv_documents": kv_documents}
    parts = [reference.forward(q, *block, documents, **kind) for block in blocks]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * (block_lse - lse).exp().t()[..., None] for o, block_lse in parts)
    grad = torch.randn_like(q)
    for block in blocks:
        got = differentiated.backward(grad, q, *block, out, lse, documents, **kind)
        want = reference.backward(grad, q, *block, out, lse, documents, **kind)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)


def test_whole_backward_and_half_precision(differentiated: FlexKernel) -> None:
    documents = Documents((0, 7, 14, 21, 22, 40))
    q, k, v, grad = (torch.randn(40, heads, 16) for heads in (4, 2, 2, 4))
    for dtype, tolerance in ((torch.float32, 5e-6), (torch.bfloat16, 0.05)):
        tensors = [x.to(dtype) for x in (q, k, v)]
        out, lse = differentiated.forward(*tensors, documents, scale=0.3)
        got = differentiated.backward(grad.to(dtype), *tensors, out, lse, documents, scale=0.3)
        want = ReferenceKernel().backward(grad.to(dtype), *tensors, out, lse, documents, scale=0.3)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_devices_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlexKernel().available("cpu", torch.bfloat16) is None
    assert "does not run on npu" in str(FlexKernel().available("npu", torch.bfloat16))
    assert "int32" in str(FlexKernel().available("cpu", torch.int32))
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert "pip install triton" in str(FlexKernel().available("cuda", torch.bfloat16))
    monkeypatch.setattr(flex, "find_spec", lambda name: ModuleSpec(name, None))
    assert FlexKernel().available("cuda", torch.float32) is None
