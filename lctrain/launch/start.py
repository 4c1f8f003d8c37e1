"""One place decides how the ranks of a job come to be."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from lctrain.config.plain import save
from lctrain.config.resolve import Resolved
from lctrain.launch.elastic import run_node
from lctrain.launch.local import run_ranks
from lctrain.launch.place import Node


def start(verb: str, resolved: Resolved, run_dir: Path | None, *, node: Node | None = None) -> int:
    """Start the ranks of a resolved job and wait for them; returns the exit code. node: start only this node's.

    The workers read the resolved config from a file, so no rank composes one of its own. The run
    directory is made by the first rank once everything it can check has been checked.
    """
    config = replace(resolved.config, run_dir=None if run_dir is None else str(run_dir))
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="lctrain-") as folder:
        path = Path(folder) / "config.yaml"
        save(config, path)
        if node is not None:
            here = resolved.sizes.world // node.count
            return run_node([verb, str(path)], node, here, timeout_s=config.launch.timeout_s)
        return run_ranks([verb, str(path)], resolved.sizes.world)
