"""The machine around the devices."""

from __future__ import annotations

from lctrain.doctor.facts import Facts
from lctrain.doctor.finding import Finding, ok, warning

_GIB = 2**30
_SHARED_LEAST = _GIB


def shared_memory(facts: Facts) -> Finding | None:
    """/dev/shm, through which workers hand over batches and ranks of one machine talk."""
    size = facts.shared_memory
    if size is None:
        return None
    if size < _SHARED_LEAST:
        text = f"/dev/shm has {size / 2**20:.0f} MiB, too little for data workers and ranks to share"
        return warning("shared mem", text, "start the container with --shm-size=16g or --ipc=host")
    return ok("shared mem", f"/dev/shm has {size / _GIB:.1f} GiB")


def affinity(facts: Facts) -> Finding:
    """Cores this process may use, against a rank for each device."""
    cores, ranks = facts.cores, facts.ranks
    text = f"{cores} core{'s' if cores > 1 else ''} for {ranks} rank{'s' if ranks > 1 else ''}"
    if cores < ranks:
        mend = "widen the affinity (taskset, CPU_AFFINITY_CONF) or the container's CPU quota"
        return warning("cores", text, mend)
    return ok("cores", text)
