"""Ranks and rendezvous from the variables ModelArts sets.

One process a host starts the host's ranks (MA_NUM_HOSTS, VC_TASK_INDEX, MA_NUM_GPUS, VC_WORKER_HOSTS); or the
platform starts a process for each card, which finds itself in the rank table (RANK_TABLE_FILE, RANK_ID, RANK_SIZE,
ASCEND_DEVICE_ID).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from lctrain.config.launch import ModelArtsConfig, split_endpoint
from lctrain.errors import ConfigError
from lctrain.launch.place import Node, Place, adopt, agree, count_of, number_of, of_node, of_rank, text_of
from lctrain.launch.rank_table import read_table
from lctrain.runtime.process import Ranks

PORT = 29_500

_HOSTS = (
    "ModelArts sets it in a training job (and MA_NUM_HOSTS, MA_NUM_GPUS, VC_TASK_INDEX, VC_WORKER_HOSTS with it); "
    "start there, or leave launch=modelarts out"
)
_CARDS = (
    "ModelArts sets RANK_TABLE_FILE, RANK_ID, RANK_SIZE and ASCEND_DEVICE_ID together when it starts a process for "
    "each card; set all four, or unset RANK_ID and RANK_SIZE to start the ranks of a host from one process"
)


def find_place(launch: ModelArtsConfig, env: MutableMapping[str, str]) -> Place:
    """This process's place; one that is a card's rank leaves torch's variables in `env`.

    Raises ConfigError outside ModelArts, and when ModelArts and `launch` contradict each other.
    """
    a_card = "RANK_ID" in env or "RANK_SIZE" in env
    return _card(launch, env) if a_card else _host(launch, env)


def _host(launch: ModelArtsConfig, env: Mapping[str, str]) -> Place:
    count, cards = (_positive(env, name) for name in ("MA_NUM_HOSTS", "MA_NUM_GPUS"))
    rank, master = 0, "127.0.0.1"
    if count > 1:
        rank, hosts = number_of(env, "VC_TASK_INDEX", _HOSTS), text_of(env, "VC_WORKER_HOSTS", _HOSTS).split(",")
        if len(hosts) != count or rank >= count:
            raise ConfigError(
                f"MA_NUM_HOSTS={count} but VC_WORKER_HOSTS names {len(hosts)} hosts and VC_TASK_INDEX={rank}; {_HOSTS}"
            )
        master = hosts[0].strip()
    endpoint = launch.rdzv_endpoint or f"{master}:{PORT}"
    agree("nproc_per_node", launch.nproc_per_node, cards, f"MA_NUM_GPUS={cards}")
    note = f"modelarts: {count_of(count, 'host')} x {count_of(cards, 'device')}, node {rank}"
    note += f", rendezvous {endpoint}" if count > 1 else ""
    return of_node(launch, Node(count, rank, endpoint), cards, starter="modelarts", note=note)


def _card(launch: ModelArtsConfig, env: MutableMapping[str, str]) -> Place:
    path = Path(text_of(env, "RANK_TABLE_FILE", _CARDS))
    rank, size, device = (number_of(env, name, _CARDS) for name in ("RANK_ID", "RANK_SIZE", "ASCEND_DEVICE_ID"))
    table = read_table(path)
    per_node = len(table.servers[0].devices)
    node, local = divmod(rank, per_node)
    if size != table.size or rank >= size:
        raise ConfigError(
            f"RANK_ID={rank} of RANK_SIZE={size} but RANK_TABLE_FILE={path} lists {table.size} devices; start with "
            "the variables and the table of one job"
        )
    env["LOCAL_RANK"] = str(local)  # what is refused from here on is said by a host's first process only
    server = table.servers[node]
    # In a container that has some of a host's cards they are counted from 0, whatever the table calls them.
    if device not in (local, server.devices[local]):
        raise ConfigError(
            f"ASCEND_DEVICE_ID={device} but RANK_TABLE_FILE={path} gives RANK_ID={rank} device "
            f"{server.devices[local]} of {server.host}; start with the variables and the table of one job"
        )
    endpoint = launch.rdzv_endpoint or f"{table.servers[0].host}:{PORT}"
    agree("node_rank", launch.node_rank, node, f"RANK_TABLE_FILE={path} makes this host {node}")
    ranks = Ranks(rank, size, local, per_node, "modelarts")
    adopt(env, ranks, *split_endpoint(endpoint))
    hosts, devices = count_of(len(table.servers), "host"), count_of(per_node, "device")
    note = f"modelarts: {hosts} x {devices}, a process each, rendezvous {endpoint}"
    return of_rank(launch, ranks, note=note if ranks.is_main else None)


def _positive(env: Mapping[str, str], name: str) -> int:
    value = number_of(env, name, _HOSTS)
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1; {_HOSTS}")
    return value
