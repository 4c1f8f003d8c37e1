"""Two ranks of one job, for what can only be measured between ranks.

All variants of a comparison run in the same two processes, in turns: they have the same connection and the same
moment of the machine.
"""

from __future__ import annotations

import datetime
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], object]
Variants = Mapping[str, tuple[Call, Call]]
RANKS = 2


def measure_between_ranks(
    make: Callable[[], Variants], *, rounds: int, repeats: int, warm: int = 3
) -> dict[str, list[list[float]]]:
    """Seconds of each variant on rank 0: `rounds` blocks of `repeats`.

    make: a module's function, called on each rank; it gives for each variant what to do before the clock starts, and
    what to time. A barrier stands between them. Raises RuntimeError when a rank ends without an answer.
    """
    from common import fixed_threads

    from lctrain.runtime.process import listen

    sock = listen()
    port = sock.getsockname()[1]
    sock.close()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    fixed = {k: v for k, v in fixed_threads(1).items() if k.endswith("_THREADS")}
    arguments = (make, port, rounds, repeats, warm, fixed, theirs)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError("a rank ended without an answer") from None
    finally:
        for process in processes:
            process.join()


def _rank(
    rank: int, make: Callable[[], Variants], port: int, rounds: int, repeats: int, warm: int, fixed: dict[str, str],
    pipe: Any,
) -> None:  # fmt: skip
    import os

    os.environ.update(fixed)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, limit)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    variants = make()
    blocks: dict[str, list[list[float]]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants) if number % 2 == 0 else list(reversed(variants))
        for name in order:
            block = []
            for repeat in range((warm if number == 0 else 0) + repeats):
                prepare, run = variants[name]
                prepare()
                dist.barrier()
                since = time.perf_counter()
                run()
                if number or repeat >= warm:
                    block.append(time.perf_counter() - since)
            blocks[name].append(block)
    dist.barrier()
    if rank == 0:
        pipe.send(blocks)
    pipe.close()
    dist.destroy_process_group()
