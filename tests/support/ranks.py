"""Ranks that live for a whole test session: starting Python and torch once, not once a test.

    def body(ranks, value): ...           # module level, runs on every rank
    pool(2).run(body, value=3)            # -> [result of rank 0, result of rank 1]

A rank that raises fails the test with its traceback; ranks that hang are killed and fail it too.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

LIMIT_S = 120.0


class RankPool:
    """`size` processes with a group between them: gloo, and the backend of `device` where that is not cpu.

    environment: what the processes see beside this one's; the folders of its PYTHONPATH come after this one's own.
    """

    def __init__(self, size: int, *, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        self.size, self._device = size, device
        self._environment = dict(environment or {})
        self._start()

    def _start(self) -> None:
        from lctrain.runtime.process import listen

        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        sock = listen()
        port = sock.getsockname()[1]
        sock.close()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, port, theirs, self._device)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            with _environment(self._environment):
                process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, body: Callable[..., Any], *, limit_s: float = LIMIT_S, **arguments: Any) -> list[Any]:
        """Run body(ranks, **arguments) on every rank; the results in rank order."""
        for pipe in self._pipes:
            pipe.send((body, arguments))
        deadline = time.monotonic() + limit_s
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            # Once one rank failed the others may wait for it for ever.
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} did not answer within {limit_s:g} s")
                continue
            ok, value = pipe.recv()
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + 3.0)
        if failures:
            self.stop()
            self._start()
            raise AssertionError("\n".join(failures))
        return results

    def stop(self) -> None:
        """Kill every rank."""
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """A process that starts within it inherits `extra` too."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank_main(rank: int, size: int, port: int, pipe: Any, device: str) -> None:
    # A spawned process gets its parent's path in place of the one its own environment names.
    sys.path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    from lctrain.runtime.device import Accelerator
    from lctrain.runtime.process import Ranks

    torch.set_num_threads(1)
    accelerator = Accelerator(device, rank if device != "cpu" else 0)
    accelerator.activate()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, datetime.timedelta(seconds=60))
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(accelerator.backend, store=store, rank=rank, world_size=size, timeout=timeout)
    # Every new mesh makes process groups, and every gloo group a thread that polls: some hundred tests later nothing
    # else would run. Equal meshes are one here.
    device_mesh.init_device_mesh = lru_cache(device_mesh.init_device_mesh)
    ranks = Ranks(rank=rank, world_size=size, local_rank=rank, local_world_size=size, launcher="lctrain")
    while True:
        try:
            body, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, body(ranks, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


_pools: dict[Any, RankPool] = {}


def pool(size: int, *, device: str = "cpu", environment: Mapping[str, str] | None = None) -> RankPool:
    """The session's pool of `size` ranks on a type of device, in an environment."""
    key = (size, device, tuple(sorted((environment or {}).items())))
    if key not in _pools:
        _pools[key] = RankPool(size, device=device, environment=environment)
    return _pools[key]


def stop_all() -> None:
    """End every pool."""
    while _pools:
        _pools.popitem()[1].stop()
