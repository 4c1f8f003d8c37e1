"""Environment variables that decide how a run starts and how long it waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, fault, ok, warning
from lctrain.errors import DeviceError
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
    """RANK_TABLE_FILE, from which torch_npu takes the addresses of ranks, must be a table that is complete."""
    path = facts.env.get("RANK_TABLE_FILE")
    if facts.kind != "npu" or path is None:
        return None
    mend = "unset RANK_TABLE_FILE where the platform did not write it for this job"
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return fault("rank table", f"RANK_TABLE_FILE={path} cannot be read ({error})", mend)
    status = table.get("status") if isinstance(table, dict) else None
    if status != "completed":
        return warning("rank table", f"RANK_TABLE_FILE={path} has status {status}, not completed", mend)
    return ok("rank table", f"RANK_TABLE_FILE={path} is complete")


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
