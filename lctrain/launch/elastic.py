"""Start this node's ranks of a job that spans nodes, through torch's elastic agent."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from lctrain.errors import EXIT_BUG, EXIT_ECHO, EXIT_OK
from lctrain.launch.forward import Forwarding
from lctrain.launch.place import Node


def run_node(arguments: Sequence[str], node: Node, ranks_per_node: int, *, timeout_s: int) -> int:
    """Run `python -m lctrain.worker ARGUMENTS` as this node's share of the ranks; returns the exit code.

    Node 0 hosts the store at node.endpoint. timeout_s: how long nodes wait for each other. Ranks are not restarted:
    a run continues from its checkpoint instead.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as AgentConfig
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))
    os.environ["LCTRAIN_LAUNCHED"] = "elastic"
    config = AgentConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=ranks_per_node,
        rdzv_backend="static",
        rdzv_endpoint=node.endpoint,
        rdzv_configs={"rank": node.rank, "timeout": timeout_s},
        run_id="lctrain",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr=None,
        logs_specs=DefaultLogsSpecs(),
        # Its own handler for SIGTERM and SIGINT would kill the ranks half a minute later, saved or not.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        with Forwarding(_send):
            elastic_launch(config, sys.executable)("-u", "-m", "lctrain.worker", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return EXIT_BUG if failure.exitcode == EXIT_ECHO else failure.exitcode
        print(f"error: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr, flush=True)
        return EXIT_BUG
    return EXIT_OK


def _send(number: int) -> None:
    """Send a signal to this node's ranks, which are the agent's child processes."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
