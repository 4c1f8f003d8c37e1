"""Batches as they really come: any number of documents, any lengths, ranks without a label. Equal to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from lctrain.config.plain import to_plain
from tests.support.ranks import pool
from tests.support.tiny import tiny_config

LENGTH = 1024


@dataclass(frozen=True)
class Pack:
    """Lengths of a sequence's documents, and how many of its first tokens nothing is learned from."""

    lengths: tuple[int, ...]
    unlabelled: int = 0


def _cut(documents: int) -> Pack:
    """LENGTH tokens in so many documents of random lengths."""
    rng = np.random.default_rng(documents)
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), documents - 1, replace=False))
    return Pack(tuple(np.diff([0, *cuts, LENGTH]).tolist()))


BATCHES = {
    "one pack": [Pack((7, 13, 28))],
    "shorter than the ranks": [Pack((1,)), Pack((2,)), Pack((3,))],
    "first ranks without labels": [Pack((48,), unlabelled=40)],
    "a pack without labels": [Pack((31, 16), unlabelled=47), Pack((5, 6))],
    "odd documents": [Pack((1, 3, 5, 7, 9, 11, 13)), Pack((27, 1, 1, 1, 21))],
    **{f"{n} documents": [_cut(n)] for n in (1, 2, 10, 100, 1000)},
}


def _results(ranks: Any, plain: dict[str, Any], batches: dict[str, list[Pack]]) -> dict[str, Any]:
    """Loss, labels and whole gradients of each batch, from one model."""
    from lctrain.data.collate import collate
    from lctrain.data.pieces import piece_of
    from lctrain.train.step import forward_backward
    from tests.support.run import build

    _, language = build(ranks, plain)
    mesh, engine = language.mesh, language.engine
    found = {}
    for name, packs in batches.items():
        # Data ranks take turns; one that is left without a sequence gets one of a token.
        packs = packs + [Pack((1,))] * (-len(packs) % mesh.sizes.data)
        rows = []
        for number, pack in enumerate(packs):
            rng, start, pieces = np.random.default_rng(number), 0, []
            for length in pack.lengths:
                mask = np.arange(start, start + length) >= pack.unlabelled
                pieces.append(piece_of(rng.integers(0, 97, length).astype(np.int32), mask))
                start += length
            rows.append(pieces)
        micro = [
            collate([row], pad_id=0, multiple=mesh.sizes.length_multiple)
            for row in rows[mesh.data_rank :: mesh.sizes.data]
        ]
        (count,), _ = mesh.sum_over_data([sum(b.count for b in micro)])
        loss = forward_backward(engine, language.objective, mesh, micro, count).mean
        gradients = {n: g.float().numpy().copy() for n, g in engine.gradients()}
        engine.step(0.0)  # forgets the gradients and moves nothing
        found[name] = {"loss": loss, "count": count, "gradients": gradients if ranks.is_main else None}
    return found


def results(size: int, *overrides: str) -> list[dict[str, Any]]:
    """Of every rank, by batch."""
    config = tiny_config(
        *overrides,
        f"data.max_length={LENGTH}",
        f"launch.nproc_per_node={size}",
        architecture={"max_position_embeddings": LENGTH},
    )
    return pool(size).run(_results, plain=to_plain(config), batches=BATCHES)


@lru_cache
def single() -> dict[str, Any]:
    """One rank's."""
    return results(1, "parallel=single", "model.attention=reference")[0]


def test_the_batches_are_what_they_are_called() -> None:
    counts = {name: r["count"] for name, r in single().items()}
    assert counts["one pack"] == 48 - 3
    assert counts["shorter than the ranks"] == 0 + 1 + 2
    assert counts["first ranks without labels"] == 8
    assert counts["a pack without labels"] == 4 + 5
    assert {n: counts[f"{n} documents"] for n in (1, 10, 1000)} == {1: 1023, 10: 1014, 1000: 24}


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ["parallel=fsdp", "memory=offload"]),
        (2, ["parallel=fsdp_sp"]),
        (2, ["parallel=fsdp_sp", "memory.tiled_mlp=3"]),
        (2, ["parallel=fsdp_cp"]),
        (2, ["parallel=fsdp_cp", "parallel.cp_method=allgather", "memory=selective"]),
        (2, ["parallel=fsdp_tp"]),
        (2, ["parallel=zero3"]),
        (2, ["parallel=zero3_sp"]),
        (4, ["parallel=fsdp_usp", "parallel.sp_size=2"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, list) else str(x),
)
def test_loss_and_gradients_equal_one_rank(size: int, overrides: list[str]) -> None:
    found = results(size, *overrides)
    for name, right in single().items():
        for rank in found:
            assert rank[name]["count"] == right["count"], name
            assert rank[name]["loss"] == pytest.approx(right["loss"], rel=1e-5), name
        gradients = found[0][name]["gradients"]
        assert gradients.keys() == right["gradients"].keys(), name
        largest = max(np.linalg.norm(g) for g in right["gradients"].values())
        for parameter, want in right["gradients"].items():
            error = np.linalg.norm(gradients[parameter] - want)
            assert error <= 2e-5 * np.linalg.norm(want) + 1e-6 * largest, (name, parameter, error)
