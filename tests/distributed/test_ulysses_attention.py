"""Ulysses over real ranks against one process: outputs, gradients, head mapping, isolation, one message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import pool

# (query heads, key/value heads): fewer, equal and more key/value heads than ranks, and ones that do not divide.
HEADS = [(8, 1), (8, 2), (8, 4), (8, 8), (12, 3), (12, 1), (12, 6)]


def _equality(ranks: Any, heads: list[tuple[int, int]]) -> list[tuple[int, int, float]]:
    """(query heads, key/value heads, largest difference of this rank's out, dq, dk, dv from one process)."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.parallel.ulysses import ulysses_attend

    documents, length = Documents((0, 5, 24, 41, 48)), 24
    width = length // ranks.world_size
    columns = slice(ranks.rank * width, (ranks.rank + 1) * width)
    results = []
    for h, k in heads:
        generator = torch.Generator().manual_seed(h * 10 + k)
        whole = [torch.randn(2, length, n, 8, generator=generator) for n in (h, k, k, h)]
        grad = whole.pop()
        leaves = [x.clone().requires_grad_() for x in whole]
        out = attend_batch(SdpaKernel(), *leaves, documents, scale=0.3)
        want = [x[:, columns] for x in (out, *torch.autograd.grad(out, leaves, grad))]
        own = [x[:, columns].clone().requires_grad_() for x in whole]
        out = ulysses_attend(partial(attend_batch, SdpaKernel()), *own, documents, scale=0.3, group=dist.group.WORLD)
        got = (out, *torch.autograd.grad(out, own, grad[:, columns]))
        results.append((h, k, max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_process_for_every_head_count(size: int) -> None:
    for results in pool(size).run(_equality, heads=HEADS):
        assert [r[:2] for r in results] == HEADS
        for h, k, error in results:
            assert error < 5e-6, (h, k, error)


def _messages(ranks: Any) -> tuple[int, int, str, bool]:
    """All-to-alls forward, and with backward; the message for heads that do not divide; isolation is bit-exact."""
    from functools import partial

    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from lctrain.errors import ModelError
    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.parallel.ulysses import ulysses_attend

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += "alltoall" in func.__name__.replace("_", "")
            return func(*args, **(kwargs or {}))

    def attend(q, k, v):
        return ulysses_attend(
            partial(attend_batch, SdpaKernel()), q, k, v, Documents((0, 5, 24)), scale=0.3, group=dist.group.WORLD
        )

    q, k, v = (torch.randn(1, 12, n, 8, requires_grad=True) for n in (4, 2, 2))
    with Count() as seen:
        out = attend(q, k, v)
        forward = seen.calls
        out.sum().backward()
    edited_k = k.detach().clone()
    if ranks.rank == 0:
        edited_k[:, 2] += 1.0  # in the first document, whose five tokens are all on rank 0
    edited = attend(q, edited_k, v)
    after = slice(5, None) if ranks.rank == 0 else slice(None)
    same = torch.equal(edited[:, after], out[:, after])
    changed = not torch.equal(edited[:, :5], out[:, :5])
    try:
        attend(torch.randn(1, 12, 3, 8), torch.randn(1, 12, 1, 8), torch.randn(1, 12, 1, 8))
        message = ""
    except ModelError as error:
        message = str(error)
    return forward, seen.calls, message, same and changed == (ranks.rank == 0)


def test_two_messages_a_pass_isolation_and_indivisible_heads() -> None:
    for forward, both, message, same in pool(2).run(_messages):
        assert (forward, both) == (2, 4)
        assert "parallel.sp_size=2 does not divide the model's 3 attention heads" in message
        assert same


def _model(ranks: Any, family: str) -> dict[str, Any]:
    """FSDP2 + Ulysses with recompute on a whole model: this rank's loss, and gradients against one process."""
    from functools import partial

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    from lctrain.models.causal_lm import build_meta, decoder_layers
    from lctrain.models.materialize import init_random, materialize_empty
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.sdpa import SdpaKernel
    from lctrain.ops.text_batch import TextBatch
    from lctrain.parallel.sequence import split_batch
    from lctrain.parallel.ulysses import ulysses_attend
    from tests.unit.models.tiny_models import config_of, packed_batch, random_model

    ids, positions, labels, documents = packed_batch()
    single = random_model(family, seed=7)
    single_loss = single(ids, positions, labels, documents)
    single_loss.backward()
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    model = build_meta(config_of(family))
    router = model.route_attention(partial(ulysses_attend, partial(attend_batch, SdpaKernel()), group=dist.group.WORLD))
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    materialize_empty(model, torch.device("cpu"))
    init_random(model, seed=7)
    own = split_batch(TextBatch(ids, positions, labels, documents, count=1, tokens=1), ranks.rank, ranks.world_size)
    loss = model(own.input_ids, own.position_ids, own.labels, own.documents)
    calls = router.calls
    loss.backward()
    errors = {}
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        grad = p.grad.full_tensor() * ranks.world_size  # FSDP2 averages
        errors[name] = ((grad - q.grad).norm() / q.grad.norm().clamp_min(1e-6)).item()
    return {"loss": loss.item(), "single": single_loss.item(), "errors": errors, "calls": calls}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_whole_model_with_fsdp_and_recompute(family: str) -> None:
    results = pool(2).run(_model, family=family)
    assert sum(r["loss"] for r in results) == pytest.approx(results[0]["single"], rel=1e-6)
    for result in results:
        assert result["calls"] == 2
        assert max(result["errors"].values()) < 5e-6, result["errors"]
