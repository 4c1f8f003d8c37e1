"""Work of one rank while others wait: its value, its note, its failure."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lctrain.errors import DataError
from lctrain.runtime.process import Ranks
from lctrain.train.gate import PeerFailed, first_on_node, share


def on_ranks(body: Any, world: int = 4, local: int = 2) -> list[Future]:
    """body(ranks, store) on threads that stand for the ranks of two nodes."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        return [
            pool.submit(
                body,
                Ranks(rank=r, world_size=world, local_rank=r % local, local_world_size=local, launcher="torchrun"),
                store,
            )
            for r in range(world)
        ]


def test_one_rank_of_each_node_works() -> None:
    worked: list[int] = []

    def body(ranks: Ranks, store: Any) -> tuple[str, str]:
        def action() -> str:
            worked.append(ranks.rank)
            return f"note of {ranks.rank}"

        return "got", first_on_node(ranks, store, "work", action, lambda note: f"read {note}", 30)

    results = [f.result() for f in on_ranks(body)]
    assert sorted(worked) == [0, 2]
    assert [text for _, text in results] == ["note of 0", "read note of 0", "note of 2", "read note of 2"]


def test_a_failure_is_told_once_and_others_know() -> None:
    def body(ranks: Ranks, store: Any) -> None:
        def action() -> str:
            raise DataError("no such file")

        first_on_node(ranks, store, "work", action, lambda note: note, 30)

    failures = [f.exception() for f in on_ranks(body, local=4)]
    assert isinstance(failures[0], DataError)
    assert all(isinstance(f, PeerFailed) for f in failures[1:])


def test_waiting_ends() -> None:
    ranks = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="torchrun")
    with pytest.raises(dist.DistStoreError):
        first_on_node(ranks, dist.HashStore(), "work", lambda: "", lambda note: note, 1)


def test_share() -> None:
    assert [f.result() for f in on_ranks(lambda ranks, store: share(ranks, store, "a", lambda: f"{ranks.rank}!"))] == [
        "0!"
    ] * 4

    def fail() -> str:
        raise DataError("no")

    failures = [f.exception() for f in on_ranks(lambda ranks, store: share(ranks, store, "a", fail))]
    assert isinstance(failures[0], DataError)
    assert all(isinstance(f, PeerFailed) for f in failures[1:])
