"""Work that one rank of each node does while the others wait, before any process group exists.

Tokenising can take hours; a collective's timeout would end the waiting ranks, and on NPUs the ranks
would fail to meet at all. Waiting on the store has a timeout of its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lctrain.runtime.process import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


class PeerFailed(RuntimeError):
    """The rank this one waited for failed, and has said why."""


def first_on_node(
    ranks: Ranks, store: Store, name: str, action: Callable[[], T], wait: Callable[[str], T], timeout_s: int
) -> T:
    """Run `action` on the node's first rank, then `wait` on the others with the note it left.

    `action` returns a value whose str() is the note. Raises PeerFailed on the others when it failed.
    """
    key = _key(ranks, name)
    if ranks.local_rank == 0:
        try:
            result = action()
        except BaseException:
            store.set(key, "failed")
            raise
        store.set(key, f"ok:{result}")
        return result
    store.wait([key], datetime.timedelta(seconds=timeout_s))
    note = store.get(key).decode()
    if not note.startswith("ok:"):
        raise PeerFailed
    return wait(note.removeprefix("ok:"))


def abandon(ranks: Ranks, store: Store, name: str) -> None:
    """Let the ranks that wait in `first_on_node` for this one go: they raise PeerFailed."""
    if ranks.local_rank == 0:
        store.set(_key(ranks, name), "failed")


def _key(ranks: Ranks, name: str) -> str:
    return f"{name}/{ranks.rank // ranks.local_world_size}"


def share(ranks: Ranks, store: Store, name: str, make: Callable[[], str]) -> str:
    """A string rank 0 makes and every rank gets. Raises PeerFailed on the others when it failed."""
    if ranks.is_main:
        try:
            value = make()
        except BaseException:
            store.set(name, "failed")
            raise
        store.set(name, f"ok:{value}")
        return value
    note = store.get(name).decode()
    if not note.startswith("ok:"):
        raise PeerFailed
    return note.removeprefix("ok:")
