"""`launch=` and the environment together: which rank this process is, or which ranks it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from lctrain.config.launch import LaunchConfig, ModelArtsConfig, SlurmConfig, TorchrunConfig
from lctrain.errors import ConfigError
from lctrain.launch import modelarts, slurm
from lctrain.launch.place import Node, Place, of_rank
from lctrain.runtime.process import Ranks, read_ranks


def find_place(launch: LaunchConfig, env: MutableMapping[str, str] = os.environ) -> Place:
    """This process's place in its job.

    Where Slurm or ModelArts started a process for each rank, `env` gets torch's variables. Raises ConfigError when
    `env` lacks what `launch` needs, or says another number of anything.
    """
    match launch:
        case SlurmConfig():
            return slurm.find_place(launch, env)
        case ModelArtsConfig():
            return modelarts.find_place(launch, env)
        case TorchrunConfig():
            return of_rank(launch, _torchrun(env))
    ranks = read_ranks(env)
    if ranks.launcher is not None:
        return of_rank(launch, ranks)
    if launch.nnodes is None:
        _check_alone(env)
    if launch.nodes == 1:
        return Place(ranks)
    assert launch.node_rank is not None
    assert launch.rdzv_endpoint is not None
    return Place(ranks, node=Node(launch.nodes, launch.node_rank, launch.rdzv_endpoint))


def _torchrun(env: Mapping[str, str]) -> Ranks:
    ranks = read_ranks(env)
    if ranks.launcher != "torchrun":
        found = f"{ranks.launcher} started this process" if ranks.launcher else "RANK and WORLD_SIZE are not set"
        raise ConfigError(
            f"launch=torchrun but {found}; write torchrun --nproc-per-node=8 -m lctrain ... launch=torchrun, or leave "
            "launch=torchrun out"
        )
    return ranks


def _check_alone(env: Mapping[str, str]) -> None:
    """Raise ConfigError where a platform started several of this process, each of which would be a job of its own."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))
    for several, said, kind in (
        ("SLURM_STEP_ID" in env and tasks != "1", f"srun started {tasks} tasks", "slurm"),
        (
            "RANK_ID" in env and env.get("RANK_SIZE", "1") != "1",
            f"RANK_SIZE={env.get('RANK_SIZE')} processes were started",
            "modelarts",
        ),
    ):
        if several:
            raise ConfigError(
                f"{said} and each would train alone; add launch={kind}, or start one process (launch.nnodes=1 says "
                "that this is meant)"
            )
