"""Ranks and rendezvous from the variables srun sets (https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT").

One task a rank, or one task a node that starts the node's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import product

from lctrain.config.launch import SlurmConfig, split_endpoint
from lctrain.errors import ConfigError
from lctrain.launch.place import Node, Place, adopt, agree, count_of, number_of, of_node, of_rank, text_of
from lctrain.runtime.process import Ranks

_START = (
    "start with srun, e.g. srun --nodes=2 --ntasks-per-node=8 python -m lctrain ... launch=slurm, or leave "
    "launch=slurm out"
)
# Below the ports that Linux hands out by itself (from 32768) and above those of common services.
_FIRST_PORT, _PORTS = 20_000, 10_000
_STEP_APART = 997  # a prime: ports of a job's first steps differ


@dataclass(frozen=True)
class _Step:
    """A job step as one of its tasks sees it. per_node: tasks on each node; local: this task's number on its node."""

    nodes: int
    node: int
    tasks: int
    task: int
    per_node: int
    local: int


def find_place(launch: SlurmConfig, env: MutableMapping[str, str]) -> Place:
    """This task's place; a task that is a rank leaves torch's variables in `env`.

    Raises ConfigError outside Slurm, and when Slurm and `launch` contradict each other.
    """
    # A batch script without srun has the other variables too, and nobody else starts the tasks they speak of.
    text_of(env, "SLURM_STEP_ID", _START)
    local = number_of(env, "SLURM_LOCALID", _START)
    env["LOCAL_RANK"] = str(local)  # what is refused from here on is said by a node's first task only
    step = _read(env, local)
    endpoint = launch.rdzv_endpoint or _endpoint(env, step)
    ranks_per_node = launch.nproc_per_node or step.per_node
    if step.per_node == 1 and ranks_per_node > 1:
        note = f"slurm: {count_of(step.nodes, 'node')} x {ranks_per_node} ranks, node 0, rendezvous {endpoint}"
        return of_node(launch, Node(step.nodes, step.node, endpoint), ranks_per_node, starter="slurm", note=note)
    if ranks_per_node != step.per_node:
        raise ConfigError(
            f"launch.nproc_per_node={ranks_per_node} but Slurm started {step.per_node} tasks on each node; write "
            f"srun --ntasks-per-node={ranks_per_node} for a task a rank, or --ntasks-per-node=1 for one that starts "
            "its node's ranks"
        )
    agree("node_rank", launch.node_rank, step.node, f"Slurm calls this node {step.node}")
    ranks = Ranks(step.task, step.tasks, step.local, step.per_node, "slurm")
    adopt(env, ranks, *split_endpoint(endpoint))
    nodes, tasks = count_of(step.nodes, "node"), count_of(step.per_node, "task")
    note = f"slurm: {nodes} x {tasks}, a rank each, rendezvous {endpoint}"
    return of_rank(launch, ranks, note=note if ranks.is_main else None)


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm list in its order: `gpu[001-003,007],login1` is gpu001, gpu002, gpu003, gpu007, login1.

    Raises ConfigError for a list that is not one.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text):
        raise _not_hosts(text)
    hosts: list[str] = []
    for name in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        # Every second piece stood in brackets.
        pieces = re.split(r"\[([^\]]*)\]", name)
        choices = [_numbers(piece, text) if n % 2 else [piece] for n, piece in enumerate(pieces)]
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _not_hosts(text)
        first, last = match[1], match[2] or match[1]
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _not_hosts(text: str) -> ConfigError:
    return ConfigError(
        f"the host list {text} is not one of Slurm's, such as gpu[001-003,007],login1; give "
        "launch.rdzv_endpoint=HOST:PORT of the first node"
    )


def _read(env: Mapping[str, str], local: int) -> _Step:
    nodes_name = _name(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    tasks_name = _name(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes, tasks = number_of(env, nodes_name, _START), number_of(env, tasks_name, _START)
    task, node = number_of(env, "SLURM_PROCID", _START), number_of(env, "SLURM_NODEID", _START)
    counts_name = _name(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    counts = text_of(env, counts_name, _START)
    per_node = _per_node(counts_name, counts)
    if per_node * nodes != tasks:
        raise ConfigError(
            f"{counts_name}={counts} with {nodes_name}={nodes} is not {tasks_name}={tasks}; write "
            "srun --nodes=NODES --ntasks-per-node=TASKS for the same number of tasks on every node"
        )
    if node * per_node + local != task:
        raise ConfigError(
            f"SLURM_PROCID={task} is task {local} of node {node}, but ranks of a node must follow each other; write "
            "srun --distribution=block"
        )
    return _Step(nodes, node, tasks, task, per_node, local)


def _name(env: Mapping[str, str], *names: str) -> str:
    """The first variable that is set: a step's own, where it has some, before its job's."""
    return next((name for name in names if env.get(name)), names[-1])


def _per_node(name: str, text: str) -> int:
    """Tasks on each node from `4`, `4(x2)` or `4,4`."""
    counts = {re.sub(r"\(x\d+\)$", "", part) for part in text.split(",")}
    if len(counts) != 1 or not (count := counts.pop()).isdecimal() or int(count) < 1:
        raise ConfigError(
            f"{name}={text} is not the same number of tasks on every node; write srun --ntasks-per-node=TASKS"
        )
    return int(count)


def _endpoint(env: Mapping[str, str], step: _Step) -> str:
    name = _name(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    text = text_of(env, name, _START)
    hosts = expand_hosts(text)
    if len(hosts) != step.nodes:
        raise ConfigError(
            f"{name}={text} names {len(hosts)} hosts but the step has {step.nodes} nodes; give "
            "launch.rdzv_endpoint=HOST:PORT of the node that has task 0"
        )
    # Steps of one job may run side by side on one host.
    place = number_of(env, "SLURM_JOB_ID", _START) + _STEP_APART * number_of(env, "SLURM_STEP_ID", _START)
    return f"{hosts[0]}:{_FIRST_PORT + place % _PORTS}"
