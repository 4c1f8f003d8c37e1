"""Ranks, the store they meet at, process groups and timeouts."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lctrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

    from lctrain.runtime.device import Accelerator

STORE_FD = "LCTRAIN_STORE_FD"


@dataclass(frozen=True)
class Ranks:
    """Who this process is.

    launcher: who started it (lctrain, torchrun, accelerate, slurm, modelarts); None for a process that nobody did.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None

    @property
    def is_main(self) -> bool:
        """Rank 0 of the whole job."""
        return self.rank == 0


def read_ranks(env: Mapping[str, str] = os.environ) -> Ranks:
    """Read the variables torchrun, accelerate and our own launcher set.

    Raises ConfigError when they are incomplete or are no ranks.
    """
    accelerate = "ACCELERATE_MIXED_PRECISION" in env
    if "RANK" not in env and "WORLD_SIZE" not in env:
        if accelerate and "MASTER_ADDR" in env:
            # accelerate's way to say that it was asked for several processes and leaves starting them to mpirun.
            raise ConfigError(
                "accelerate's num_processes is more than 1 but it started one process, as it does with "
                "distributed_type: MULTI_CPU; set distributed_type: MULTI_GPU (with use_cpu: true on CPUs), or start "
                "with python -m lctrain (or unset MASTER_ADDR if num_processes is 1)"
            )
        return Ranks(launcher="accelerate" if accelerate else None)
    missing = [k for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if k not in env]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set although RANK or WORLD_SIZE is; start with torchrun, accelerate "
            "launch or python -m lctrain, or unset RANK and WORLD_SIZE"
        )
    launcher = "lctrain" if STORE_FD in env or "LCTRAIN_LAUNCHED" in env else "accelerate" if accelerate else "torchrun"
    world = _number(env, "WORLD_SIZE", 1, None)
    here = _number(env, "LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in env else world
    if world % here:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={here} does not divide WORLD_SIZE={world}; start as many ranks on every node"
        )
    return Ranks(
        rank=_number(env, "RANK", 0, world - 1),
        world_size=world,
        local_rank=_number(env, "LOCAL_RANK", 0, here - 1),
        local_world_size=here,
        launcher=launcher,
    )


def _number(env: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    """A launcher's whole number. Raises ConfigError when it is none, or out of range."""
    text = env[name].strip()
    if text.isdecimal() and int(text) >= least and (most is None or int(text) <= most):
        return int(text)
    rule = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise ConfigError(
        f"{name}={text} is not a whole number {rule}; start with torchrun, accelerate launch or python -m lctrain, or "
        "unset RANK and WORLD_SIZE"
    )


def connect(ranks: Ranks, timeout_s: int, env: Mapping[str, str] = os.environ) -> Store:
    """The key-value store all ranks share, before any process group exists."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    if ranks.world_size == 1 and "MASTER_ADDR" not in env:
        return dist.HashStore()
    if STORE_FD in env:
        listen = int(env[STORE_FD]) if ranks.is_main else None
        return dist.TCPStore(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            ranks.world_size,
            ranks.is_main,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listen,
        )
    # torchrun may host the store itself; torch's own handler knows.
    store, _, _ = next(iter(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)))
    store.set_timeout(timeout)
    return dist.PrefixStore("lctrain", store)


def start_groups(ranks: Ranks, store: Store, device: Accelerator, timeout_s: int) -> None:
    """Create the default process group: gloo for host tensors and the device's own backend."""
    import torch.distributed as dist

    # A group that is bound to a device gets subgroups by splitting, which HCCL cannot do.
    options: dict[str, Any] = {"device_id": device.torch_device} if device.type == "cuda" else {}
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("groups", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        **options,
    )


def stop_groups() -> None:
    """Destroy the process groups, if any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def listen() -> socket.socket:
    """A listening socket on a free loopback port, handed to rank 0 so that nobody can take the port in between."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.set_inheritable(True)
    return sock


def say_first(store: Store | None, text: str) -> bool:
    """Print unless another rank has: the first failure is the cause, later ones are its echoes."""
    try:
        first = store is None or store.add("lctrain/failures", 1) == 1
    except RuntimeError:  # the store died with the rank that hosts it, which has spoken
        first = False
    if first:
        print(text, file=sys.stderr, flush=True)
    return first
