"""What ring and all-gather attention compute, when, and in which precision they add it up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_ring import Case, columns_of, inputs_of, kernel_of, layout_of
from tests.support.ranks import pool


def _sums(ranks: Any, method: str) -> set[str]:
    """Dtypes that blocks of bf16 inputs are added up in, forward and backward."""
    import torch

    from lctrain.parallel.blocks import Blocks

    case = Case((0, 96), 1, 1, ranks.world_size, method, dtype="bfloat16")
    seen: set[str] = set()
    real = Blocks.forward_add, Blocks.backward_add

    def noting(method: Any) -> Any:
        def call(self: Any, first: Any, kv: Any, rectangles: Any, *sums: Any) -> None:
            seen.update(str(x.dtype) for x in sums)
            method(self, first, kv, rectangles, *sums)

        return call

    documents, *whole, grad = inputs_of(case)
    columns = columns_of(case)
    own = [x[:, columns].clone().requires_grad_() for x in whole]
    Blocks.forward_add, Blocks.backward_add = (noting(m) for m in real)
    try:
        out = layout_of(case, kernel_of("sdpa"))(*own, documents, scale=0.3)
        torch.autograd.grad(out, own, grad[:, columns])
    finally:
        Blocks.forward_add, Blocks.backward_add = real
    return seen


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_blocks_are_added_up_in_fp32(method: str) -> None:
    assert pool(2).run(_sums, method=method) == [{"torch.float32"}] * 2


def _work(ranks: Any, method: str, length: int) -> tuple[int, int]:
    """(query, key) pairs the kernel was given on this rank, forward and backward."""
    import torch

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.reference import ReferenceKernel

    class Counting(ReferenceKernel):
        pairs = [0, 0]

        def count(self, index: int, documents: Documents, causal: bool, kv_documents: Documents | None) -> None:
            keys = documents if kv_documents is None else kv_documents
            rectangles = sum((b - a) * (d - c) for (a, b), (c, d) in zip(documents.spans(), keys.spans(), strict=True))
            self.pairs[index] += documents.causal_pairs if causal else rectangles

        def forward(self, q, k, v, documents, *, scale, causal=True, kv_documents=None):
            self.count(0, documents, causal, kv_documents)
            return super().forward(q, k, v, documents, scale=scale, causal=causal, kv_documents=kv_documents)

        def backward(self, grad, q, k, v, out, lse, documents, *, scale, causal=True, kv_documents=None):
            self.count(1, documents, causal, kv_documents)
            kind = {"scale": scale, "causal": causal, "kv_documents": kv_documents}
            return super().backward(grad, q, k, v, out, lse, documents, **kind)

    case = Case((0, length), 1, 1, ranks.world_size, method)
    kernel = Counting()
    q, k, v = (torch.randn(1, length // ranks.world_size, h, 8, requires_grad=True) for h in (2, 1, 1))
    layout_of(case, kernel)(q, k, v, Documents(case.bounds), scale=0.3).sum().backward()
    return kernel.pairs[0], kernel.pairs[1]


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_ranks_share_the_work_on_one_long_document(method: str) -> None:
    length = 1024
    for pairs in zip(*pool(4).run(_work, method=method, length=length), strict=True):
        assert sum(pairs) == length * (length + 1) // 2  # each visible pair once, and no other
        assert max(pairs) / min(pairs) < 1.05


def _events(ranks: Any) -> tuple[list[str], list[str]]:
    """What happens in which order, forward and backward."""
    import torch
    import torch.distributed as dist

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.reference import ReferenceKernel

    events: list[str] = []

    class Noting(ReferenceKernel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("compute")
            return super().forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("compute")
            return super().backward(*args, **kwargs)

    class Works(list):
        """The wait for a message, noted at its first work."""

        def __iter__(self) -> Any:
            events.append("wait")
            return super().__iter__()

    real = dist.batch_isend_irecv

    def start(operations: Any) -> Any:
        events.append("send")
        return Works(real(operations))

    case = Case((0, 64), 1, 1, ranks.world_size)
    q, k, v = (torch.randn(1, 64 // ranks.world_size, h, 8, requires_grad=True) for h in (2, 1, 1))
    dist.batch_isend_irecv = start
    try:
        out = layout_of(case, Noting())(q, k, v, Documents(case.bounds), scale=0.3)
        forward = list(events)
        events.clear()
        out.sum().backward()
    finally:
        dist.batch_isend_irecv = real
    return forward, events


def test_messages_travel_while_blocks_are_computed() -> None:
    for forward, backward in pool(2).run(_events):
        # Own triangles and own rectangle while the other rank's keys are under way, then those.
        assert forward == ["send", "compute", "compute", "wait", "compute"]
        # Keys leave first; their gradients follow one hop behind and are waited for when there is something to add.
        assert backward == [
            "send", "compute", "compute", "send", "wait", "compute", "wait", "send", "wait",
        ]  # fmt: skip
