"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# One thread a process: results do not depend on the machine, and ranks do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    yield
    from tests.support.ranks import stop_all

    stop_all()
