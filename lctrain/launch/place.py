"""Where a process stands in its job, and what it takes to say so."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lctrain.config.launch import LaunchConfig
from lctrain.errors import ConfigError
from lctrain.runtime.process import Ranks


@dataclass(frozen=True)
class Node:
    """This node among `count` > 1 of a job; they meet at `endpoint`, host:port of the first."""

    count: int
    rank: int
    endpoint: str


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job.

    ranks: its rank; launcher None means that ranks are ours to start. world_size: all ranks, None for as many as
    the config says. starter: who decided that number. node: this node among several, if its ranks are ours to start.
    note: what was read from a platform's variables, for the job's first process to say; else None.
    """

    ranks: Ranks
    world_size: int | None = None
    starter: str = "lctrain"
    node: Node | None = None
    note: str | None = None


def of_rank(launch: LaunchConfig, ranks: Ranks, *, note: str | None = None) -> Place:
    """The place of one of a launcher's ranks. Raises ConfigError when `launch` wants other numbers of them."""
    assert ranks.launcher is not None
    here, nodes = ranks.local_world_size, ranks.world_size // ranks.local_world_size
    agree(
        "nproc_per_node", launch.nproc_per_node, here, f"{ranks.launcher} started {count_of(here, 'rank')} on this node"
    )
    agree("nnodes", launch.nnodes, nodes, f"{ranks.launcher} started ranks on {count_of(nodes, 'node')}")
    return Place(ranks, ranks.world_size, ranks.launcher, note=note)


def of_node(launch: LaunchConfig, node: Node, ranks_per_node: int, *, starter: str, note: str) -> Place:
    """The place of a process that starts a node's ranks. Raises ConfigError when `launch` says otherwise of nodes."""
    agree("nnodes", launch.nnodes, node.count, f"{starter} has {count_of(node.count, 'node')}")
    agree("node_rank", launch.node_rank, node.rank, f"{starter} calls this node {node.rank}")
    return Place(
        Ranks(),
        node.count * ranks_per_node,
        starter,
        node if node.count > 1 else None,
        note if node.rank == 0 else None,
    )


def agree(name: str, ours: int | None, theirs: int, said: str) -> None:
    """Raise ConfigError unless launch.`name` is null or what a launcher `said`."""
    if ours is not None and ours != theirs:
        raise ConfigError(f"launch.{name}={ours} but {said}; leave launch.{name} out, or change one of the two")


def adopt(env: MutableMapping[str, str], ranks: Ranks, host: str, port: int) -> None:
    """Give `env` what torchrun would have: torch's rendezvous and libraries read it."""
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks.local_world_size)))
    env.update(
        {
            "RANK": str(ranks.rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
    )


def text_of(env: Mapping[str, str], name: str, mend: str) -> str:
    """A variable. Raises ConfigError with `mend` when it is not set or empty."""
    text = env.get(name, "").strip()
    if not text:
        raise ConfigError(f"{name} is not set; {mend}")
    return text


def number_of(env: Mapping[str, str], name: str, mend: str) -> int:
    """The whole number of a variable. Raises ConfigError with `mend` when it is not set, or is none."""
    text = text_of(env, name, mend)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is not a whole number; {mend}")
    return int(text)


def count_of(number: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
