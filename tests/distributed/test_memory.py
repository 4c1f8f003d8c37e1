"""What is kept between forward and backward, and what is never built."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config

TOKENS, VOCAB, WIDTH, HEADS = 1024, 3001, 64, 4
RANDOM_STATE = 5056  # bytes of the CPU's random state, which a recomputation starts from


def plain_of(*overrides: str, layers: int = 2) -> dict[str, Any]:
    """A model whose logits would be far larger than anything else it makes."""
    return to_plain(
        tiny_config(
            f"data.max_length={TOKENS}",
            "memory.loss_chunk_mb=1",
            *overrides,
            architecture={
                "vocab_size": VOCAB,
                "hidden_size": WIDTH,
                "num_hidden_layers": layers,
                "num_attention_heads": HEADS,
                "max_position_embeddings": TOKENS,
            },
        )
    )


def _one_batch(language: Any) -> Any:
    """This rank's part of one long document."""
    import numpy as np

    from lctrain.data.collate import collate
    from lctrain.data.pieces import piece_of

    ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS).astype(np.int32)
    return language.objective.shard(collate([[piece_of(ids)]], pad_id=0))


def _kept_bytes(ranks: Any, plain: dict[str, Any]) -> int:
    """Bytes that are still allocated after a forward pass and were not before it."""
    from torch.profiler import ProfilerActivity, profile

    from tests.support.run import build

    _, language = build(ranks, plain)
    batch = _one_batch(language)
    with language.engine.microstep(last=True):
        language.objective.loss_sum(language.engine.model, batch).backward()  # what is made once is made now
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss = language.objective.loss_sum(language.engine.model, batch)
        loss.backward()
    return sum(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")


def kept_a_layer(*overrides: str) -> float:
    """What one decoder layer keeps for its backward, in [tokens, width] fp32 tensors."""
    two, four = (pool(1).run(_kept_bytes, plain=plain_of(*overrides, layers=n))[0] for n in (2, 4))
    return (four - two) / 2 / (TOKENS * WIDTH * 4)


def test_full_recompute_keeps_the_input_of_each_layer_and_nothing_else() -> None:
    assert kept_a_layer("memory=full") == pytest.approx(1.0 + RANDOM_STATE / (TOKENS * WIDTH * 4), abs=0.01)


def test_without_recompute_everything_is_kept() -> None:
    assert kept_a_layer("memory=none") > 10


def test_selective_keeps_the_attention_output_too() -> None:
    # Input, output and log-sum-exp [tokens, heads].
    wanted = 2.0 + HEADS / WIDTH + RANDOM_STATE / (TOKENS * WIDTH * 4)
    assert kept_a_layer("memory=selective") == pytest.approx(wanted, abs=0.05)


def _saved(ranks: Any, plain: dict[str, Any]) -> tuple[list[tuple[int, ...]], int]:
    """(shapes of what autograd saved outside recomputed layers, attention calls of forward and backward)."""
    import torch

    from tests.support.run import build

    _, language = build(ranks, plain)
    batch = _one_batch(language)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        loss = language.objective.loss_sum(language.engine.model, batch)
    language.engine.backward(loss)
    return saved, language.router.calls


def saved(memory: str) -> tuple[Counter[tuple[int, ...]], int, int]:
    """(shapes saved by two more layers, attention calls with two layers and with four)."""
    (two, calls_two), (four, calls_four) = (
        pool(1).run(_saved, plain=plain_of(f"memory={memory}", layers=n))[0] for n in (2, 4)
    )
    return Counter(four) - Counter(two), calls_two, calls_four


def test_recompute_wraps_each_layer_once() -> None:
    assert saved("full") == ({(1, TOKENS, WIDTH): 2}, 2 * 2, 2 * 4)  # one input a layer; once forward, once again


def test_without_recompute_every_operation_saves() -> None:
    shapes, *calls = saved("none")
    assert shapes.total() > 2 * 15
    assert calls == [2, 4]


def _largest(ranks: Any, plain: dict[str, Any]) -> tuple[int, int, int, int]:
    """Elements of the largest tensor of a step, of one of an evaluation, of whole logits here, of all parameters."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tests.support.run import build

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
            return out

    _, language = build(ranks, plain)
    batch = _one_batch(language)
    with Largest() as step, language.engine.microstep(last=True):
        language.engine.backward(language.objective.loss_sum(language.engine.model, batch))
    with Largest() as evaluation, torch.no_grad():
        language.objective.loss_sum(language.engine.module, batch)
    return step.elements, evaluation.elements, batch.input_ids.numel() * VOCAB, language.model.size.parameters


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, ["parallel=single"]),
        (1, ["parallel=single", "precision=bf16"]),
        (2, ["parallel=ddp", "memory=full"]),
        (2, ["parallel=fsdp", "memory=full"]),
        (2, ["parallel=fsdp_sp", "memory=full"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_no_tensor_of_tokens_times_vocabulary(size: int, overrides: list[str]) -> None:
    for step, evaluation, logits, parameters in pool(size).run(_largest, plain=plain_of(*overrides)):
        # DDP's bucket and FSDP2's gathered root may be as large as the model, which here is smaller than the logits.
        assert max(step, evaluation) <= max(parameters, 2**20 // 4) < 0.4 * logits
