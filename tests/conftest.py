"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# One thread a process: results do not depend on the machine, and ranks do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A busy machine must not fail a test, and a test that failed must fail again.
settings.register_profile("lctrain", deadline=None, derandomize=True)
settings.load_profile("lctrain")


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    yield
    from tests.support.ranks import stop_all

    stop_all()
