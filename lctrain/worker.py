"""One rank of a job: `python -m lctrain.worker VERB CONFIG`, or called inside torchrun or accelerate."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path

from lctrain.config.plain import load
from lctrain.config.root import TrainConfig
from lctrain.errors import EXIT_BUG, EXIT_ECHO, LctrainError, TrainingStopped
from lctrain.runtime.ascend import import_torch
from lctrain.runtime.process import Ranks, connect, read_ranks, say_first, stop_groups
from lctrain.runtime.signals import end_with_parent

# verb: module with rank_main(session) -> exit code
_JOBS = {
    "train": "lctrain.train.train_job",
    "evaluate": "lctrain.train.evaluate_job",
    "verify": "lctrain.train.verify_job",
    "measure": "lctrain.plan.measure",
    "selftest": "lctrain.selftest.job",
}


def main() -> None:
    """Entry point of a rank we started."""
    if (parent := os.environ.get("LCTRAIN_PARENT")) is not None:
        end_with_parent(int(parent))  # no rank is left behind when the launcher is killed
    verb, path = sys.argv[1:]
    code = work(verb, load(Path(path)), read_ranks())
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter teardown: communication threads of a failed job may never join.
    os._exit(code)


def work(verb: str, config: TrainConfig, ranks: Ranks) -> int:
    """Run this rank's part of a job; returns its exit code. The first rank that fails says why, once."""
    # Before torch is imported: when a rank dies, every other one would print a C++ stack of its lost connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import_torch(config.device)
    except LctrainError as error:  # the same on every rank of a machine; without torch there is no store to ask
        return error.exit_code if ranks.local_rank == 0 and say_first(None, f"error: {error}") else EXIT_ECHO
    from lctrain.train.gate import PeerFailed
    from lctrain.train.out_of_memory import explain
    from lctrain.train.session import Session
    from lctrain.train.stop import StopFlag

    # Whole tensors are put together one at a time only to compare or to save; torch warns that this is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if not ranks.is_main:
        warnings.simplefilter("ignore")
    stop = StopFlag()
    stop.install()
    store = session = None
    try:
        store = connect(ranks, config.launch.timeout_s)
        session = Session(config, ranks, store, stop)
        code = int(import_module(_JOBS[verb]).rank_main(session))
        stop_groups()
        return code
    except PeerFailed:
        return EXIT_ECHO
    except LctrainError as error:
        return error.exit_code if say_first(store, f"error: {error}") else EXIT_ECHO
    except TrainingStopped as error:
        return EXIT_BUG if say_first(store, f"error: {error}") else EXIT_ECHO
    except Exception as error:
        if _lost_peer(error):
            say_first(store, f"rank {ranks.rank} lost its connection to another rank, which has ended")
            return EXIT_ECHO
        known = None if session is None else explain(error, session)
        if known is not None:
            return known.exit_code if say_first(store, f"error: {known}") else EXIT_ECHO
        text = f"rank {ranks.rank} failed:\n{traceback.format_exc()}"
        return EXIT_BUG if say_first(store, text) else EXIT_ECHO


def _lost_peer(error: Exception) -> bool:
    """Whether gloo says that another rank's process is gone: the cause is there, and so is the traceback."""
    text = str(error)
    return "gloo" in text and any(why in text for why in ("closed by peer", "reset by peer", "Broken pipe"))


if __name__ == "__main__":
    main()
