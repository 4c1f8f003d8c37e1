"""The selftest on one rank: kernels, collectives, layouts."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from lctrain.errors import EXIT_OK
from lctrain.selftest.collectives import collective_rows
from lctrain.selftest.fused import fused_rows
from lctrain.selftest.kernels import kernel_rows
from lctrain.selftest.parity import parity_rows
from lctrain.selftest.row import Row, of_all_ranks
from lctrain.train.session import Session, versions

RESULTS = "selftest.json"


def rank_main(session: Session) -> int:
    """Test; the first rank writes what it found into run_dir."""
    began = time.monotonic()
    session.check()
    mesh = session.connect()
    session.log(f"selftest on {mesh.sizes.world} x {session.device.name}")
    rows: list[Row] = []
    device = session.device
    sections = (kernel_rows(device), fused_rows(device), collective_rows(device), parity_rows(session))
    for number, section in enumerate(sections):
        found = _everywhere(session, number, list(section))
        rows += found
        if found:
            session.log(f"{found[0].section}: {len(found)} rows, {sum(not row.ok for row in found)} differ")
    if session.ranks.is_main:
        results = {
            "device": session.device.name,
            "memory_bytes": session.device.total_memory_bytes(),
            "ranks": mesh.sizes.world,
            "versions": versions(),
            "seconds": time.monotonic() - began,
            "rows": [asdict(row) for row in rows],
        }
        path = Path(str(session.config.run_dir)) / RESULTS
        path.write_text(json.dumps(results), encoding="utf-8")
    # The store lives in the first rank, which must not end before the others are done with it.
    mesh.barrier()
    return EXIT_OK


def _everywhere(session: Session, section: int, found: list[Row]) -> list[Row]:
    """On the first rank, the rows of all of them together, since any card may be the broken one."""
    ranks, key = session.ranks, f"selftest/{section}"
    if not ranks.is_main:
        session.store.set(f"{key}/{ranks.rank}", json.dumps([asdict(row) for row in found]))
        return found
    others = (json.loads(session.store.get(f"{key}/{rank}")) for rank in range(1, ranks.world_size))
    return of_all_ranks([found, *([Row(**row) for row in rows] for rows in others)])
