"""Live blocks of memory by address, when not every free is heard of."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor

from lctrain.plan import measure
from lctrain.plan.measure import LiveBlocks


def blocks(*taken: tuple[int, int]) -> LiveBlocks:
    """Blocks at (address, size), all counted."""
    live = LiveBlocks()
    for address, size in taken:
        live.allocate(address, size, counted=True)
    return live


def test_blocks_are_held_until_they_are_freed() -> None:
    live = blocks((100, 10), (200, 20))
    assert live.held == 30
    live.free(100)
    assert live.held == 20
    live.free(200)
    assert live.held == 0


def test_a_free_of_something_unknown_changes_nothing() -> None:
    live = blocks((100, 10))
    live.free(105)
    live.free(7)
    assert live.held == 10
    live.free(100)
    live.free(100)
    assert live.held == 0


def test_blocks_that_do_not_count_are_known_all_the_same() -> None:
    live = LiveBlocks()
    live.allocate(100, 10, counted=False)
    live.allocate(200, 20, counted=True)
    assert live.held == 20
    live.free(100)
    assert live.held == 20
    live.allocate(190, 100, counted=False)  # in the place of the counted one
    assert live.held == 0


@pytest.mark.parametrize(
    ("address", "size", "held"),
    [
        (100, 10, 10 + 20),  # the very place of the first
        (105, 2, 2 + 20),  # inside it
        (95, 6, 6 + 20),  # over its beginning
        (109, 5, 5 + 20),  # over its end
        (90, 200, 200),  # over both
        (105, 96, 96),  # from inside the first into the second
        (110, 90, 10 + 90 + 20),  # between them, touching both
        (95, 5, 10 + 5 + 20),  # before, touching
        (220, 5, 10 + 20 + 5),  # after, touching
    ],
)
def test_where_a_block_begins_no_old_one_can_be(address: int, size: int, held: int) -> None:
    live = blocks((100, 10), (200, 20))
    live.allocate(address, size, counted=True)
    assert live.held == held


def test_a_block_that_went_unheard_is_not_freed_twice() -> None:
    live = blocks((100, 10))
    live.allocate(105, 10, counted=True)  # the one at 100 had gone
    live.free(100)
    assert live.held == 10
    live.free(105)
    assert live.held == 0


def test_held_is_what_a_plain_account_of_bytes_says() -> None:
    """Random blocks over 64 bytes against one owner a byte."""
    rng = random.Random(0)
    live = LiveBlocks()
    known: dict[int, tuple[int, bool]] = {}
    for _ in range(500):
        if known and rng.random() < 0.4:
            address = rng.choice(list(known))
            live.free(address)
            del known[address]
        else:
            address, size, counted = rng.randrange(64), rng.randint(1, 9), rng.random() < 0.7
            known = {a: (n, c) for a, (n, c) in known.items() if a + n <= address or address + size <= a}
            known[address] = size, counted
            live.allocate(address, size, counted=counted)
        assert live.held == sum(n for n, c in known.values() if c)


class _Op:
    """An operation of a namespace that gives back what it was given."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


def test_what_a_collective_was_given_is_kept_until_the_next_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    monkeypatch.setattr(measure.time, "sleep", moments.append)
    mode = measure._LastToLetGo()
    sent = torch.zeros(3)
    kept = weakref.ref(sent)
    mode.__torch_dispatch__(_Op("c10d"), (), (sent,))
    del sent
    assert kept() is not None
    assert moments == []
    mode.__torch_dispatch__(_Op("aten"), (), (torch.zeros(1),))
    assert kept() is None
    assert moments == [measure._MOMENT_S]
    mode.__torch_dispatch__(_Op("aten"), (), (torch.zeros(1),))
    assert len(moments) == 1
    assert mode.__torch_dispatch__(_Op("aten"), (DTensor,), ()) is NotImplemented
