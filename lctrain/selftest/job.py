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
from lctrain.selftest.row import Row
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
    for section in (kernel_rows(device), fused_rows(device), collective_rows(device), parity_rows(session)):
        found = list(section)
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
