"""Environment variables that decide how a run starts and how long it waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, fault, ok, warning
from lctrain.errors import ConfigError, DeviceError
from lctrain.launch.rank_table import read_table
from lctrain.runtime.environment import (
    ALLOC,
    CONNECT,
    CUDA_ALLOC,
    EXEC,
    NPU_ALLOC,
    allocator_problem,
    connect_problem,
    connect_timeout,
    exec_problem,
    exec_timeout,
)


def allocator(facts: Facts) -> Finding | None:
    """Both variables of torch_npu's allocator; otherwise the one that is set."""
    if facts.kind == "cpu":
        return None
    problem = allocator_problem(facts.env)
    if facts.kind == "npu" and problem is not None:
        return fault("allocator", *problem)
    names = (NPU_ALLOC, ALLOC) if facts.kind == "npu" else (ALLOC, CUDA_ALLOC)
    given = [f"{name}={facts.env[name]}" for name in names if name in facts.env]
    return ok("allocator", ", ".join(given) or f"{names[0]} is not set: a run sets expandable_segments:True")


def connecting(facts: Facts) -> Finding | None:
    """How long HCCL waits for ranks that start apart."""
    ours = connect_timeout(facts.timeout_s)
    return _timeout(facts, "connect", CONNECT, ours, lambda: connect_problem(facts.env))


def executing(facts: Facts) -> Finding | None:
    """How long a collective waits, against the process group's timeout."""
    ours = exec_timeout(facts.timeout_s)
    return _timeout(facts, "execution", EXEC, ours, lambda: exec_problem(facts.timeout_s, facts.env))


def rank_table(facts: Facts) -> Finding | None:
    """RANK_TABLE_FILE, from which torch_npu takes the addresses of ranks, must be a table that a run takes."""
    path = facts.env.get("RANK_TABLE_FILE")
    if facts.kind != "npu" or path is None:
        return None
    otherwise = "or unset RANK_TABLE_FILE where the platform did not write it for this job"
    try:
        table = read_table(Path(path))
    except ConfigError as error:
        what, mend = str(error).split("; ", 1)
        return fault("rank table", what, f"{mend}, {otherwise}")
    return ok("rank table", f"RANK_TABLE_FILE={path} has {len(table.servers)} x {len(table.servers[0].devices)} ranks")


def _timeout(
    facts: Facts,
    check: str,
    name: str,
    ours: int,
    ask: Callable[[], tuple[str, str] | None],
) -> Finding | None:
    if facts.kind != "npu":
        return None
    try:
        problem = ask()
    except DeviceError as error:
        return fault(check, str(error).split("; ")[0], f"unset {name}")
    if problem is not None:
        return warning(check, *problem)
    given = f"{name}={facts.env[name]} s" if name in facts.env else f"{name} is not set: a run sets {ours} s"
    return ok(check, f"{given}; collectives {facts.timeout_s} s (launch.timeout_s)")
